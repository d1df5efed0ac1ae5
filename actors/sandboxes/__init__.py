"""Boxes in which the tools of an environment run."""
