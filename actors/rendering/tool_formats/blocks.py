"""Calls that stand between `<tool_call>` tags, whatever is written in them.

A tag inside of a call's arguments is part of them. So a block ends with the first closing tag after what belongs to
its call, as far as that can be told: `reach` gives, for a text and the start of a block, where that ends (the start
itself where nothing can be told).
"""

from collections.abc import Callable, Iterator

from headrace.platform.contracts import ParsedMessage
from headrace.platform.records.message import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
Reach = Callable[[str, int], int]


def parse_blocks(text: str, reach: Reach, read: Callable[[str, int], ToolCall | str]) -> ParsedMessage:
    """The blocks of a turn as calls and the rest as content.

    Args:
        text: what was said.
        reach: see above.
        read: a block's body and its number to a call, or to what is wrong with it.
    """
    said, calls, error, position = "", list[ToolCall](), "", 0
    while (opened := text.find(OPEN, position)) >= 0:
        start = opened + len(OPEN)
        closed = text.find(CLOSE, reach(text, start))
        if closed < 0:
            return ParsedMessage(text, error=error or f"a {OPEN} is not closed with {CLOSE}")
        call = read(text[start:closed], len(calls))
        if isinstance(call, str):
            error = error or call
        else:
            calls.append(call)
        said += text[position:opened]
        position = closed + len(CLOSE)
    content = (said + text[position:]).strip()
    if CLOSE in content:
        error = error or f"a {CLOSE} stands there without its {OPEN}"
    return ParsedMessage(content, error=error) if error else ParsedMessage(content, "", tuple(calls))


def block_quotes(text: str, reach: Reach) -> Iterator[tuple[int, int]]:
    """Where what belongs to calls stands, from and to."""
    position = 0
    while (opened := text.find(OPEN, position)) >= 0:
        start = opened + len(OPEN)
        position = reach(text, start)
        if position > start:
            yield start, position
