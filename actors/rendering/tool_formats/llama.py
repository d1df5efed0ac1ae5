"""The calls of Llama 3: a turn that is nothing but JSON."""

import re
from collections.abc import Iterator

from headrace.actors.rendering.tool_formats.base import json_call, json_end, read_json
from headrace.platform.contracts import ParsedMessage
from headrace.platform.records.message import ToolCall

_TAG = "<|python_tag|>"
_BEFORE = re.compile(rf"(?:\A|</think>)\s*(?:{re.escape(_TAG)})?\s*(?=\{{)")


class LlamaToolFormat:
    """`{"name": …, "parameters": {…}}`, several with `;` between them, after `<|python_tag|>` or nothing.

    No tag sets a call apart from an answer in JSON, so without one a call is a turn that begins with an object whose
    first key is "name" and which has "parameters" (or "arguments", as other families say). All else is an answer.
    """

    signature = "llama-3"

    def parse(self, text: str) -> ParsedMessage:
        """See `ToolFormat.parse`."""
        said = text.strip()
        written = said.removeprefix(_TAG).lstrip()
        if not (said.startswith(_TAG) or _names_first(written)):
            return ParsedMessage(said)
        calls: list[ToolCall] = []
        while written:
            body, written = _object(written)
            key = _key(body)
            if not (key or said.startswith(_TAG)):
                return ParsedMessage(said)
            call = json_call(body, key or "parameters", len(calls))
            if isinstance(call, str):
                return ParsedMessage("", error=call)
            calls.append(call)
            if written and not written.startswith(("{", ";")):
                return ParsedMessage("", error="nothing may follow a tool call in the same turn")
            written = written.removeprefix(";").lstrip()
        return ParsedMessage("", "", tuple(calls))

    def quotes(self, text: str) -> Iterator[tuple[int, int]]:
        """See `TaggedFormat.quotes`. No tag opens a call, so it is told by what it follows: nothing, or a thought."""
        return ((match.end(), json_end(text, match.end())) for match in _BEFORE.finditer(text))


def _names_first(text: str) -> bool:
    """Whether this is an object whose first key is "name", complete or not."""
    return text.startswith("{") and text[1:].lstrip().startswith('"name"')


def _key(body: str) -> str:
    """The key of this object that holds arguments, if any does; what cannot be read is taken for a call."""
    try:
        call = read_json(body)
    except ValueError:
        return "parameters"
    return next((key for key in ("parameters", "arguments") if isinstance(call, dict) and key in call), "")


def _object(text: str) -> tuple[str, str]:
    """The first JSON object and what follows it; all of a text that has none."""
    end = json_end(text) or len(text)
    return text[:end], text[end:].lstrip()
