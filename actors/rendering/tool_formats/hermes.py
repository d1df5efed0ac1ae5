"""The calls of Hermes and Qwen models: JSON between tags."""

from collections.abc import Iterator

from headrace.actors.rendering.tool_formats.base import json_call, json_end
from headrace.actors.rendering.tool_formats.blocks import block_quotes, parse_blocks
from headrace.platform.contracts import ParsedMessage


class HermesToolFormat:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`; text around the calls is content."""

    signature = "hermes"

    def parse(self, text: str) -> ParsedMessage:
        """See `ToolFormat.parse`."""
        return parse_blocks(text, json_end, lambda body, index: json_call(body, "arguments", index))

    def quotes(self, text: str) -> Iterator[tuple[int, int]]:
        """See `TaggedFormat.quotes`."""
        return block_quotes(text, json_end)
