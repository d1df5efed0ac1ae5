"""Calls that stand between `<tool_call>` tags, whatever is written in them."""

import re
from collections.abc import Callable

from headrace.platform.contracts import ParsedMessage
from headrace.platform.records.message import ToolCall

_BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def parse_blocks(text: str, read: Callable[[str, int], ToolCall | str]) -> ParsedMessage:
    """The blocks of a turn as calls and the rest as content.

    Args:
        text: what was said.
        read: a block's body and its number to a call, or to what is wrong with it.
    """
    opened = text.count("<tool_call>")
    if opened != text.count("</tool_call>"):
        return ParsedMessage(text, error="a <tool_call> is not closed with </tool_call>")
    if not opened:
        return ParsedMessage(text.strip())
    content = _BLOCK.sub("", text).strip()
    calls: list[ToolCall] = []
    for match in _BLOCK.finditer(text):
        call = read(match.group(1), len(calls))
        if isinstance(call, str):
            return ParsedMessage(content, error=call)
        calls.append(call)
    if "<tool_call>" in content:
        return ParsedMessage(content, error="a </tool_call> stands before its <tool_call>")
    return ParsedMessage(content, "", tuple(calls))
