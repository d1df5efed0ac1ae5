"""What the formats share: the contract, ids of calls, and JSON that any store can take."""

import functools
import json
import math
import re
from collections.abc import Iterable
from typing import Any, Protocol

import msgspec

from headrace.platform.contracts import ParsedMessage
from headrace.platform.records.message import ToolCall

# Keys that some models write beside a call's name and that say nothing more.
_IGNORED = ("id", "type")
_OPENING = re.compile(r"\s*\{")
_decoder = json.JSONDecoder()


class ToolFormat(Protocol):
    """Reads tool calls out of the text of an assistant turn. `signature` names it and its settings."""

    signature: str

    def parse(self, text: str) -> ParsedMessage:
        """Content and calls, or an `error` that tells the model what is wrong. Never raises."""


class TaggedFormat(ToolFormat, Protocol):
    """A format before whose words a thought may stand in tags."""

    def quotes(self, text: str) -> Iterable[tuple[int, int]]:
        """Where whole calls stand, from and to: a tag in there is part of an argument."""


@functools.lru_cache(maxsize=64)
def call_id(index: int) -> str:
    """The id of a turn's call number `index`; all turns share the strings."""
    return f"call_{index}"


def read_json(text: str) -> Any:
    """The value of a JSON text. What no store could take (an endless number, half a surrogate pair) is as wrong as
    what cannot be read, and so is a key that is given twice: one of its values would be lost.

    Raises:
        ValueError: and says why.
    """
    try:
        value = json.loads(text, parse_constant=_no_number, parse_float=_finite, object_pairs_hook=_object)
        msgspec.msgpack.encode(value)
    except (OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from error
    return value


def json_end(text: str, start: int = 0) -> int:
    """Where the JSON object that begins at `start`, or after spaces there, ends; `start` where there is none."""
    match = _OPENING.match(text, start)
    try:
        return _decoder.raw_decode(text, match.end() - 1)[1] if match else start
    except (ValueError, RecursionError):
        return start


def json_call(body: str, key: str, index: int) -> ToolCall | str:
    """The call that a JSON object with "name" and `key` makes, or what is wrong with it (case X1). Arguments under
    another key are told to the model, for a call without them is another call."""
    try:
        call = read_json(body)
    except ValueError as error:
        return f"the tool call is not valid JSON: {error}"
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return f'a tool call is a JSON object with "name" and "{key}"'
    if unknown := [each for each in call if each not in ("name", key, *_IGNORED)]:
        return f'a tool call has "name" and "{key}", not {json.dumps(unknown[0])}; arguments stand in "{key}"'
    return call_with(call["name"], call.get(key, {}), key, index)


def call_with(name: str, arguments: Any, key: str, index: int) -> ToolCall | str:
    """The call, or what is wrong with its arguments (case X1: a string that holds JSON is no object)."""
    if not isinstance(arguments, dict):
        return f'"{key}" of {name} must be a JSON object, not {type(arguments).__name__}'
    return ToolCall(name, arguments, call_id(index))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {json.dumps(twice)} is given twice")
    return value


def _no_number(constant: str) -> None:
    raise ValueError(f"{constant} is not a number of JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is beyond the numbers that can be kept")
    return number
