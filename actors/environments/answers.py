"""What a foreign environment returned, checked where it returned it: a wrong type is the environment's fault.

The message names the method, its file and line, what came and what is expected. Values are not judged here.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from headrace.actors.frames import defined_at
from headrace.platform.errors import EnvironmentFault
from headrace.platform.records.message import (
    Cost,
    HashPair,
    Message,
    Observation,
    RewardComponent,
    StepResult,
    ToolSpec,
)
from headrace.platform.records.status import Status

_STEP_FIELDS = (("status", Status), ("cost", Cost))


def checked_observation(value: Any, method: Callable[..., Any]) -> Observation:
    """`value`, if `method` may return it from a reset. Raises EnvironmentFault."""
    if not isinstance(value, Observation):
        raise _wrong(method, "", value, "a headrace.Observation")
    _check_said(value, method)
    return value


def checked_step(value: Any, method: Callable[..., Any]) -> StepResult:
    """`value`, if `method` may return it from a step. Raises EnvironmentFault."""
    if not isinstance(value, StepResult):
        raise _wrong(method, "", value, "a headrace.StepResult")
    _check_said(value, method)
    for field, kind in _STEP_FIELDS:
        if not isinstance(getattr(value, field), kind):
            raise _wrong(method, field, getattr(value, field), f"a {kind.__name__}")
    _check_items(method, "rewards", value.rewards, RewardComponent)
    for reward in value.rewards:
        if not isinstance(reward.value, int | float):
            raise _wrong(method, "the value of a reward", reward.value, "a number")
    return value


def checked_tools(value: Any, method: Callable[..., Any]) -> Sequence[ToolSpec]:
    """`value`, if `method` may return it as the tools on offer. Raises EnvironmentFault."""
    _check_items(method, "", value, ToolSpec)
    tools: Sequence[ToolSpec] = value
    return tools


def _check_said(value: Observation | StepResult, method: Callable[..., Any]) -> None:
    """What observations and results have in common."""
    _check_items(method, "messages", value.messages, Message)
    for message in value.messages:
        if not isinstance(message.content, str):
            raise _wrong(method, "the content of a message", message.content, "text")
    if not isinstance(value.state_hash, HashPair):
        raise _wrong(method, "state_hash", value.state_hash, "a HashPair, such as headrace.hash_value(state) gives")
    if not isinstance(value.metadata, dict):
        raise _wrong(method, "metadata", value.metadata, "a dict")
    if value.metadata:
        try:
            msgspec.json.encode(value.metadata)
        except Exception as error:  # case X16: what no hop can carry is refused at the first
            raise EnvironmentFault(f"{_name(method)} returned metadata that is not JSON: {error}", False) from error


def _check_items(method: Callable[..., Any], field: str, value: Any, kind: type) -> None:
    if not isinstance(value, tuple | list):
        raise _wrong(method, field, value, f"a sequence of headrace.{kind.__name__}")
    for item in value:
        if not isinstance(item, kind):
            raise _wrong(method, f"an item of {field}" if field else "an item", item, f"a headrace.{kind.__name__}")


def _wrong(method: Callable[..., Any], field: str, value: Any, expected: str) -> EnvironmentFault:
    found = "None" if value is None else type(value).__name__
    as_what = f"{found} as {field}" if field else found
    return EnvironmentFault(f"{_name(method)} returned {as_what}; expected {expected}", transient=False)


def _name(method: Callable[..., Any]) -> str:
    return f"{defined_at(method)}: {getattr(method, '__qualname__', 'a method')}"
