"""What foreign code states as a reward, in plain Python values: whatever is one number is taken, the rest is refused.

The scalars of numpy and torch, `Decimal` and `Fraction` are numbers here and floats from here on, so that no later hop
meets a type that it cannot write down. Messages read on from "… returned".
"""

import math
from numbers import Number
from typing import Any

from headrace.actors.text import well_formed_text
from headrace.platform.records.message import RewardComponent
from headrace.platform.records.status import RewardKind


def plain_number(value: Any, what: str = "") -> float:
    """`value` as a finite float. `what` says in messages what it was returned as.

    Raises:
        TypeError: it is not one number, such as None, a text or a list.
        ValueError: it is not finite.
    """
    number = value if type(value) is float else _as_float(value)
    if number is None:
        raise TypeError(f"{named(value)}{_as(what)}; expected a number")
    if not math.isfinite(number):
        raise ValueError(f"{value!r:.80}{_as(what)}; expected a finite number")
    return number


def plain_flag(value: Any, what: str) -> bool:
    """`value` as a bool, if it is one of Python's or numpy's. Raises TypeError."""
    if isinstance(value, bool):
        return value
    if type(value).__name__ not in ("bool", "bool_"):  # numpy 1 and 2 name it differently
        raise TypeError(f"{named(value)}{_as(what)}; expected a bool")
    return bool(value)


def plain_reward(reward: Any) -> RewardComponent:
    """`reward` with plain fields; the value of one that is not valid is dropped.

    Raises:
        TypeError: it is no `RewardComponent`, or a field has a wrong type.
        ValueError: its value is not finite.
    """
    if not isinstance(reward, RewardComponent):
        raise TypeError(f"{named(reward)} as a reward; expected a headrace.RewardComponent")
    kind, evidence = reward.kind, reward.evidence
    if not isinstance(kind, str) or kind not in list(RewardKind):
        raise TypeError(f"{kind!r:.80} as the kind of a reward; expected one of {', '.join(RewardKind)}")
    if not isinstance(evidence, str):
        raise TypeError(f"{named(evidence)} as the evidence of a reward; expected text")
    valid = plain_flag(reward.valid, "valid of a reward")
    value = plain_number(reward.value, "the value of a reward") if valid else 0.0
    return RewardComponent(RewardKind(kind), value, valid, well_formed_text(evidence))


def named(value: Any) -> str:
    """What a message calls a value of a wrong type."""
    return "None" if value is None else type(value).__name__


def _as(what: str) -> str:
    return f" as {what}" if what else ""


def _as_float(value: Any) -> float | None:
    """`value` as a float, which may be infinite; None if it is not one number."""
    if not isinstance(value, Number):
        try:
            value = value.item()  # the scalars of numpy and torch, and arrays of one
        except Exception:  # foreign code: there is none, or it holds several
            return None
        if not isinstance(value, Number):
            return None
    try:
        return float(value)  # type: ignore[arg-type]
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):  # complex; a signalling NaN
        return math.nan if hasattr(value, "is_nan") else None
