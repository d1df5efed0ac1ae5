"""Scorers by kind: the built-in ones by name, a user's own as `module:attribute`."""

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from headrace.actors.scoring.answers import ExactScorer, NumericScorer, RegexScorer
from headrace.platform.contracts import Scorer
from headrace.platform.errors import ConfigError

SCORERS: dict[str, Callable[..., Scorer]] = {"exact": ExactScorer, "numeric": NumericScorer, "regex": RegexScorer}


def build_scorer(kind: str, args: Mapping[str, Any]) -> Scorer:
    """The scorer `kind`, made with `args`.

    Raises:
        ConfigError: for an unknown kind or argument, or a `module:attribute` that does not import.
    """
    factory = _imported(kind) if ":" in kind else SCORERS.get(kind)
    if factory is None:
        near = get_close_matches(kind, SCORERS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(SCORERS)}, or your own as module:attribute"
        raise ConfigError(f"no scorer {kind!r}; {hint}")
    try:
        inspect.signature(factory).bind(**args)
    except TypeError as error:
        known = ", ".join(inspect.signature(factory).parameters) or "none"
        raise ConfigError(f"scorer {kind!r}: {error}; its arguments: {known}") from None
    return factory(**args)


def _imported(kind: str) -> Callable[..., Scorer]:
    module, attribute = kind.split(":", 1)
    try:
        factory: Callable[..., Scorer] = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the scorer {kind!r} does not import: {error}") from error
    return factory
