"""What the formats share: the contract, ids of calls, and JSON that any store can take."""

import functools
import json
import math
from typing import Any, Protocol

import msgspec

from headrace.platform.contracts import ParsedMessage
from headrace.platform.records.message import ToolCall


class ToolFormat(Protocol):
    """Reads tool calls out of the text of an assistant turn. `signature` names it and its settings."""

    signature: str

    def parse(self, text: str) -> ParsedMessage:
        """Content and calls, or an `error` that tells the model what is wrong. Never raises."""


@functools.lru_cache(maxsize=64)
def call_id(index: int) -> str:
    """The id of a turn's call number `index`; all turns share the strings."""
    return f"call_{index}"


def read_json(text: str) -> Any:
    """The value of a JSON text. What no store could take (an endless number, half a surrogate pair) is as wrong as
    what cannot be read.

    Raises:
        ValueError: and says why.
    """
    try:
        value = json.loads(text, parse_constant=_no_number, parse_float=_finite)
        msgspec.msgpack.encode(value)
    except (OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from error
    return value


def json_call(body: str, key: str, index: int) -> ToolCall | str:
    """The call that a JSON object with "name" and `key` makes, or what is wrong with it."""
    try:
        call = read_json(body)
    except ValueError as error:
        return f"the tool call is not valid JSON: {error}"
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return f'a tool call is a JSON object with "name" and "{key}"'
    return call_with(call["name"], call.get(key, {}), key, index)


def call_with(name: str, arguments: Any, key: str, index: int) -> ToolCall | str:
    """The call, or what is wrong with its arguments (case X1: a string that holds JSON is no object)."""
    if not isinstance(arguments, dict):
        return f'"{key}" of {name} must be a JSON object, not {type(arguments).__name__}'
    return ToolCall(name, arguments, call_id(index))


def _no_number(constant: str) -> None:
    raise ValueError(f"{constant} is not a number of JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is beyond the numbers that can be kept")
    return number
