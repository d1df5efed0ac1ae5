"""The calls of DeepSeek: special tokens with full-width bars around names and JSON."""

import re
from collections.abc import Iterator

from headrace.actors.rendering.tool_formats.base import call_with, read_json
from headrace.platform.contracts import ParsedMessage
from headrace.platform.records.message import ToolCall

_BAR = "\uff5c"


def bar_token(name: str) -> str:
    """DeepSeek's special token of this name: full-width bars, and a low block for every space."""
    return f"<{_BAR}{name.replace(' ', chr(0x2581))}{_BAR}>"


_ALL_BEGIN, _ALL_END = bar_token("tool calls begin"), bar_token("tool calls end")
_BEGIN, _END, _SEPARATOR = bar_token("tool call begin"), bar_token("tool call end"), bar_token("tool sep")
_WHOLE = re.compile(f"{re.escape(_BEGIN)}[^{_BAR}]*{re.escape(_SEPARATOR)}[^{_BAR}]*{re.escape(_END)}")
_FENCE = re.compile(r"```(?:json)?\s*(.*?)\s*```", re.DOTALL)


class DeepSeekToolFormat:
    """`BEGIN function SEPARATOR NAME` and fenced JSON (V3, R1), or `BEGIN NAME SEPARATOR JSON` (V3.1), then `END`.

    Each stands between the tokens for all calls of a turn, after which the turn ends.
    """

    signature = "deepseek"

    def parse(self, text: str) -> ParsedMessage:
        """See `ToolFormat.parse`."""
        content, opened, rest = text.partition(_ALL_BEGIN)
        content = content.strip()
        if any(tag in content for tag in (_BEGIN, _END, _ALL_END)):
            return ParsedMessage(content, error=f"tool calls stand between {_ALL_BEGIN} and {_ALL_END}")
        if not opened:
            return ParsedMessage(content)
        section, closed, after = rest.partition(_ALL_END)
        if not closed:
            return ParsedMessage(content, error=f"{_ALL_BEGIN} is not closed with {_ALL_END}")
        if after.strip():
            return ParsedMessage(content, error="nothing may follow the tool calls in the same turn")
        calls: list[ToolCall] = []
        for written in section.split(_BEGIN)[1:]:
            body, closed, between = written.partition(_END)
            call = _call(body, len(calls)) if closed and not between.strip() else f"a call ends with {_END}"
            if isinstance(call, str):
                return ParsedMessage(content, error=call)
            calls.append(call)
        if not calls or section.partition(_BEGIN)[0].strip():
            return ParsedMessage(content, error=f"every tool call begins with {_BEGIN}")
        return ParsedMessage(content, "", tuple(calls))

    def quotes(self, text: str) -> Iterator[tuple[int, int]]:
        """See `TaggedFormat.quotes`."""
        return (match.span() for match in _WHOLE.finditer(text))


def _call(body: str, index: int) -> ToolCall | str:
    head, separated, tail = body.partition(_SEPARATOR)
    if not separated:
        return f"a tool call has {_SEPARATOR} before its name"
    name, written = head.strip(), tail.strip()
    if name == "function":
        name, _, written = written.partition("\n")
        name, written = name.strip(), written.strip()
    if not name:
        return "a tool call has a name"
    fenced = _FENCE.fullmatch(written)
    try:
        arguments = read_json(fenced.group(1) if fenced else written)
    except ValueError as error:
        return f"the arguments of {name} are not valid JSON: {error}"
    return call_with(name, arguments, "arguments", index)
