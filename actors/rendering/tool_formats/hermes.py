"""The calls of Hermes and Qwen models: JSON between tags."""

from headrace.actors.rendering.tool_formats.base import json_call
from headrace.actors.rendering.tool_formats.blocks import parse_blocks
from headrace.platform.contracts import ParsedMessage


class HermesToolFormat:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`; text around the calls is content."""

    signature = "hermes"

    def parse(self, text: str) -> ParsedMessage:
        """See `ToolFormat.parse`."""
        return parse_blocks(text, lambda body, index: json_call(body, "arguments", index))
