"""How a family of models writes tool calls as text. One class a format, built by `build_tool_format`."""

import functools
import json
import re
from typing import Any, Protocol

import msgspec

from headrace.platform.contracts import ParsedMessage
from headrace.platform.errors import ConfigError
from headrace.platform.records.message import ToolCall


class ToolFormat(Protocol):
    """Reads tool calls out of the text of an assistant turn."""

    def parse(self, text: str) -> ParsedMessage:
        """Content and calls, or an `error` that tells the model what is wrong. Never raises."""


class InlineToolFormat:
    """`<call>NAME ARG ARG</call>`: few tokens, for small models. Arguments are positional, split at spaces."""

    def __init__(self, parameters: dict[str, list[str]]) -> None:
        # With the name itself, so that all calls of a tool share one string.
        self._parameters: dict[str, tuple[str, list[str] | None]] = {
            name: (name, names) for name, names in parameters.items()
        }

    def parse(self, text: str) -> ParsedMessage:
        """See `ToolFormat.parse`."""
        content, *written = text.split("<call>")
        if "</call>" in content:
            return ParsedMessage(content, error="a </call> closes no tool call; a call is <call>NAME ARGUMENT</call>")
        calls: list[ToolCall] = []
        for call in written:
            body, closed, after = call.partition("</call>")
            if not closed:
                return ParsedMessage(content, error="a tool call is opened with <call> but not closed with </call>")
            name, *values = body.split() or [""]
            name, names = self._parameters.get(name, (name, None))
            if names is None:  # no such tool, as the world will say
                values, names = [], []
            if len(values) != len(names):
                return ParsedMessage(content, error=f"{name} takes {len(names)} arguments: {', '.join(names)}")
            arguments = dict(zip(names, values))  # noqa: B905 - their lengths are equal
            calls.append(ToolCall(name, arguments, _call_id(len(calls))))
            if after:
                return ParsedMessage(content, error="nothing may follow a tool call in the same turn")
        return ParsedMessage(content, "", tuple(calls))


class HermesToolFormat:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as Hermes and Qwen models write it."""

    _block = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)

    def parse(self, text: str) -> ParsedMessage:
        """See `ToolFormat.parse`."""
        reasoning, text = _split_reasoning(text)
        if text.count("<tool_call>") != text.count("</tool_call>"):
            return ParsedMessage(text, reasoning, error="a <tool_call> is not closed with </tool_call>")
        calls: list[ToolCall] = []
        for match in self._block.finditer(text):
            call = _json_call(match.group(1), _call_id(len(calls)))
            if isinstance(call, str):
                return ParsedMessage(self._block.sub("", text).strip(), reasoning, error=call)
            calls.append(call)
        content = self._block.sub("", text).strip()
        if "<tool_call>" in content:
            return ParsedMessage(content, reasoning, error="a </tool_call> stands before its <tool_call>")
        return ParsedMessage(content, reasoning, tuple(calls))


@functools.lru_cache(maxsize=64)
def _call_id(index: int) -> str:
    """The id of a turn's call number `index`; all turns share the strings."""
    return f"call_{index}"


def _split_reasoning(text: str) -> tuple[str, str]:
    """What was thought and what was said. A thought that is opened and not closed goes on to the end (case X2)."""
    head, closed, tail = text.partition("</think>")
    opened = head.lstrip().startswith("<think>")
    return (head.strip().removeprefix("<think>").strip(), tail) if closed or opened else ("", text)


def _json_call(body: str, call_id: str) -> ToolCall | str:
    """The call, or what is wrong with it. What no store could take (an endless number, half a surrogate pair) is as
    wrong as what cannot be read."""
    try:
        call: Any = json.loads(body, parse_constant=_no_number)
        msgspec.msgpack.encode(call)
    except (ValueError, OverflowError, RecursionError) as error:
        return f"the tool call is not valid JSON: {error}"
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return 'a tool call is a JSON object with "name" and "arguments"'
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return f'"arguments" of {call["name"]} must be a JSON object, not {type(arguments).__name__}'
    return ToolCall(call["name"], arguments, call_id)


def _no_number(constant: str) -> None:
    raise ValueError(f"{constant} is not a number of JSON")


def build_tool_format(kind: str, parameters: dict[str, list[str]]) -> ToolFormat:
    """The format named `kind`.

    Raises:
        ConfigError: for an unknown kind.
    """
    if kind == "inline":
        return InlineToolFormat(parameters)
    if kind == "hermes":
        return HermesToolFormat()
    raise ConfigError(f"unknown tool format {kind!r}; known: hermes, inline")
