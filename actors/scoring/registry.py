"""Scorers by kind: headrace's own by name, a user's as `./file.py:Name` or `package.module:Name`."""

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from headrace.actors.scoring.answers import ExactScorer, NumericScorer, RegexScorer
from headrace.actors.scoring.reward_function import RewardScorer
from headrace.actors.targets import is_target, load_target
from headrace.platform.contracts import Scorer
from headrace.platform.errors import ConfigError

_SCORER_PARTS = ("score", "score_group", "version")


def _reasoning_gym(name: str) -> Scorer:
    from headrace.actors.tasks.reasoning_gym import ReasoningGymScorer

    return ReasoningGymScorer(name)


SCORERS: dict[str, Callable[..., Scorer]] = {
    "exact": ExactScorer,
    "numeric": NumericScorer,
    "regex": RegexScorer,
    "reasoning_gym": _reasoning_gym,
}


def build_scorer(kind: str, args: Mapping[str, Any]) -> Scorer:
    """The scorer `kind`, made with `args`.

    Args:
        kind: a name; or a target that is a plain reward function (see `RewardScorer`), a class that implements
            `Scorer`, or an environment with a `scorer()` of its own, such as a `headrace.SingleTurn`.
        args: for the reward function or the constructor.

    Raises:
        ConfigError: for an unknown kind or argument, or a target that cannot be loaded or is no scorer.
    """
    if kind in SCORERS:
        own: Scorer = _made(SCORERS[kind], args, kind)
        return own
    if not is_target(kind):
        near = get_close_matches(kind, SCORERS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(SCORERS)}."
        raise ConfigError(f"no scorer {kind!r}; {hint} Your own is written ./file.py:Name")
    value, origin = load_target(kind)
    scorer: Any
    if inspect.isclass(value):
        scorer = _made(value, args, kind)
    elif callable(getattr(value, "scorer", None)):
        scorer = _made(value.scorer, args, kind)
    elif inspect.isroutine(value):
        return RewardScorer(value, args)
    else:
        raise ConfigError(f"{kind} is {value!r:.80}; expected a reward function, a class of scorers or an environment")
    if missing := [each for each in _SCORER_PARTS if not hasattr(scorer, each)]:
        raise ConfigError(f"{origin.target} makes no scorer: it lacks {', '.join(missing)}")
    made: Scorer = scorer
    return made


def _made(factory: Callable[..., Any], args: Mapping[str, Any], kind: str) -> Any:
    try:
        inspect.signature(factory).bind(**args)
    except TypeError as error:
        known = ", ".join(inspect.signature(factory).parameters) or "none"
        raise ConfigError(f"scorer {kind!r}: {error}; its arguments: {known}") from None
    return factory(**args)
