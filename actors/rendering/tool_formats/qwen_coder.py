"""The calls of Qwen3-Coder and Qwen3.5: a function and its parameters as tags."""

import re
from collections.abc import Iterator
from typing import Any

from headrace.actors.rendering.tool_formats.base import call_with, read_json
from headrace.actors.rendering.tool_formats.blocks import block_quotes, parse_blocks
from headrace.platform.contracts import ParsedMessage
from headrace.platform.records.message import ToolCall

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)</parameter>\s*", re.DOTALL)
_HEAD = re.compile(r"\s*<function=[^>\n]+>")
# A parameter that may mention the end of a block, but no new one: that would be the next call's.
_QUOTED = re.compile(r"\s*<parameter=[^>\n]+>(?:(?!<tool_call>).)*?</parameter>", re.DOTALL)
_SHAPE = "<function=NAME><parameter=KEY>value</parameter></function>"


class QwenCoderToolFormat:
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>`.

    The format does not say what type a value has. A JSON object or array is read as that; any other value is the text
    as written, without the newline after its opening tag and before its closing one. So `5`, `true` and `null` are
    texts: a world that wants a number makes one of its text, while no world could tell how a number was written.
    """

    signature = "qwen3-coder"

    def parse(self, text: str) -> ParsedMessage:
        """See `ToolFormat.parse`."""
        return parse_blocks(text, _reach, _call)

    def quotes(self, text: str) -> Iterator[tuple[int, int]]:
        """See `TaggedFormat.quotes`."""
        return block_quotes(text, _reach)


def _reach(text: str, start: int) -> int:
    """The end of the last parameter that is whole, or of the function's opening tag."""
    match = _HEAD.match(text, start)
    position = start
    while match:
        position = match.end()
        match = _QUOTED.match(text, position)
    return position


def _call(body: str, index: int) -> ToolCall | str:
    function = _FUNCTION.fullmatch(body)
    if function is None:
        return f"a tool call is {_SHAPE}"
    name, written = function.group(1).strip(), function.group(2)
    arguments: dict[str, Any] = {}
    position = 0
    while match := _PARAMETER.match(written, position):
        key = match.group(1).strip()
        if key in arguments:
            return f"{name}: the parameter {key} is given twice"
        arguments[key] = _value(match.group(2))
        position = match.end()
    if written[position:].strip():
        return f"{name}: every parameter is <parameter=KEY>value</parameter>, and nothing stands between them"
    return call_with(name, arguments, "parameters", index)


def _value(text: str) -> Any:
    text = text.removeprefix("\n").removesuffix("\n")
    try:
        return read_json(text) if text.lstrip().startswith(("{", "[")) else text
    except ValueError:
        return text
