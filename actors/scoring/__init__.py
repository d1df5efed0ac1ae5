"""Scorers: from a finished episode to reward components, and the process that they run in."""

from headrace.actors.scoring.registry import build_scorer

__all__ = ["build_scorer"]
