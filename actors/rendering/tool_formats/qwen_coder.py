"""The calls of Qwen3-Coder and Qwen3.5: a function and its parameters as tags."""

import re
from typing import Any

from headrace.actors.rendering.tool_formats.base import call_with, read_json
from headrace.actors.rendering.tool_formats.blocks import parse_blocks
from headrace.platform.contracts import ParsedMessage
from headrace.platform.records.message import ToolCall

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)</parameter>\s*", re.DOTALL)
_SHAPE = "<function=NAME><parameter=KEY>value</parameter></function>"


class QwenCoderToolFormat:
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>`.

    The format does not say what type a value has. One that is a JSON number, object, array, true, false or null is
    read as that; any other is the string itself, without the newline after its opening tag and before its closing one.
    So a string that looks like a number is read as a number: a world that wants strings must ask for them.
    """

    signature = "qwen3-coder"

    def parse(self, text: str) -> ParsedMessage:
        """See `ToolFormat.parse`."""
        return parse_blocks(text, _call)


def _call(body: str, index: int) -> ToolCall | str:
    function = _FUNCTION.fullmatch(body)
    if function is None:
        return f"a tool call is {_SHAPE}"
    name, written = function.group(1).strip(), function.group(2)
    arguments: dict[str, Any] = {}
    position = 0
    while match := _PARAMETER.match(written, position):
        arguments[match.group(1).strip()] = _value(match.group(2))
        position = match.end()
    if written[position:].strip():
        return f"{name}: every parameter is <parameter=KEY>value</parameter>, and nothing stands between them"
    return call_with(name, arguments, "parameters", index)


def _value(text: str) -> Any:
    text = text.removeprefix("\n").removesuffix("\n")
    try:
        value = read_json(text)
    except ValueError:
        return text
    # Strings are written without quotes, so quotes belong to the string.
    return text if isinstance(value, str) else value
