"""Renderers: messages to tokens and back. `load_renderer` finds the right one for a model folder."""

from headrace.actors.rendering.loading import load_renderer

__all__ = ["load_renderer"]
