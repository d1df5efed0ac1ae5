"""Patterns as of fnmatch, compiled once: which names fit, and whether one set of patterns lies within another."""

import fnmatch
import functools
import re

Patterns = tuple[str, ...]


@functools.lru_cache(maxsize=4096)
def _compiled(patterns: Patterns) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{fnmatch.translate(pattern)})" for pattern in patterns))


def fits(name: str, patterns: Patterns) -> bool:
    """Whether `name` fits one of `patterns`; upper and lower case are told apart, and `*` spans any characters."""
    return _compiled(patterns).match(name) is not None


def within(inner: Patterns, outer: Patterns) -> bool:
    """Whether all that fits `inner` fits `outer` too; empty patterns fit everything. May say no where it is so, never
    yes where it is not."""
    if not outer:
        return True
    return bool(inner) and all(any(_covers(wide, narrow) for wide in outer) for narrow in inner)


def _covers(wide: str, narrow: str) -> bool:
    if wide in (narrow, "*"):
        return True
    if "[" in narrow:  # the text of a class says nothing about what fits it
        return False
    if any(sign in narrow for sign in "*?"):
        # A star of `wide` takes in whatever the signs of `narrow` stand for; its other characters stand for themselves.
        return "?" not in wide and "[" not in wide and fits(narrow, (wide,))
    return fits(narrow, (wide,))
