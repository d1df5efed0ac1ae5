"""What a foreign environment returned, checked where it returned it: a wrong type is the environment's fault.

The message names the method, its file and line, what came and what is expected. Values are not judged here, but that a
number is finite. Scalars of numpy and the like become Python's, and names of members the members, so that no later hop
meets what it cannot write down or takes for something else; so go on with what the functions return.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, TypeVar

import msgspec

from headrace.actors.frames import defined_at
from headrace.actors.scoring.values import plain_flag, plain_number, plain_reward
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
from headrace.platform.records.status import Role, Status

M = TypeVar("M", bound=StrEnum)
S = TypeVar("S", Observation, StepResult)
_TEXTS = ("content", "reasoning", "tool_call_id")
_COUNTS = ("prompt_tokens", "sampled_tokens", "tool_calls")


def checked_observation(value: Any, method: Callable[..., Any]) -> Observation:
    """`value` with plain fields, if `method` may return it from a reset. Raises EnvironmentFault."""
    if not isinstance(value, Observation):
        raise _wrong(method, "", value, "a headrace.Observation")
    return _checked_said(value, method)


def checked_step(value: Any, method: Callable[..., Any]) -> StepResult:
    """`value` with plain fields, if `method` may return it from a step. Raises EnvironmentFault."""
    if not isinstance(value, StepResult):
        raise _wrong(method, "", value, "a headrace.StepResult")
    result = _checked_said(value, method)
    _check_items(method, "rewards", value.rewards, RewardComponent)
    if not isinstance(value.cost, Cost):
        raise _wrong(method, "cost", value.cost, "a Cost")
    try:
        found: dict[str, Any] = {
            "rewards": tuple(map(plain_reward, value.rewards)),
            "terminated": plain_flag(value.terminated, "terminated"),
            "truncated": plain_flag(value.truncated, "truncated"),
            "status": _member(Status, value.status, "status", method),
            "cost": _plain_cost(value.cost),
        }
    except (TypeError, ValueError) as error:
        raise EnvironmentFault(f"{_name(method)} returned {error}", transient=False) from None
    return msgspec.structs.replace(result, **found)


def checked_tools(value: Any, method: Callable[..., Any]) -> Sequence[ToolSpec]:
    """`value`, if `method` may return it as the tools on offer. Raises EnvironmentFault."""
    _check_items(method, "", value, ToolSpec)
    tools: Sequence[ToolSpec] = value
    return tools


def _checked_said(value: S, method: Callable[..., Any]) -> S:
    """What observations and results have in common."""
    _check_items(method, "messages", value.messages, Message)
    messages = tuple(_checked_message(message, method) for message in value.messages)
    hashes = value.state_hash
    if not (isinstance(hashes, HashPair) and isinstance(hashes.raw, str) and isinstance(hashes.canonical, str)):
        raise _wrong(method, "state_hash", hashes, "a HashPair, such as headrace.hash_value(state) gives")
    if not isinstance(value.metadata, dict):
        raise _wrong(method, "metadata", value.metadata, "a dict")
    if value.metadata:
        try:
            msgspec.json.encode(value.metadata)
            msgspec.msgpack.encode(value.metadata)  # as it is stored: whole numbers have 64 bits
        except Exception as error:  # case X16: what no hop can carry is refused at the first
            raise EnvironmentFault(f"{_name(method)} returned metadata that is not JSON: {error}", False) from error
    return msgspec.structs.replace(value, messages=messages)


def _checked_message(message: Message, method: Callable[..., Any]) -> Message:
    for field in _TEXTS:
        if not isinstance(getattr(message, field), str):
            raise _wrong(method, f"the {field} of a message", getattr(message, field), "text")
    role = _member(Role, message.role, "the role of a message", method)
    return message if role is message.role else msgspec.structs.replace(message, role=role)


def _plain_cost(cost: Cost) -> Cost:
    found = {field: plain_number(getattr(cost, field), f"{field} of a Cost") for field in cost.__struct_fields__}
    return msgspec.structs.replace(cost, **(found | {field: int(found[field]) for field in _COUNTS}))


def _member(kind: type[M], value: Any, field: str, method: Callable[..., Any]) -> M:
    """The member that `value` is or names."""
    if isinstance(value, str) and value in list(kind):
        return kind(value)
    raise _wrong(method, field, value, f"a {kind.__name__}: {', '.join(kind)}")


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
