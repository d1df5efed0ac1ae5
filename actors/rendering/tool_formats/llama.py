"""The calls of Llama 3: a turn that is nothing but JSON."""

import json

from headrace.actors.rendering.tool_formats.base import json_call
from headrace.platform.contracts import ParsedMessage
from headrace.platform.records.message import ToolCall

_TAG = "<|python_tag|>"
_decoder = json.JSONDecoder()


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
            key = next((key for key in ("parameters", "arguments") if f'"{key}"' in body), "")
            call = json_call(body, key or "parameters", len(calls))
            if isinstance(call, str):
                return ParsedMessage("", error=call)
            if not (key or said.startswith(_TAG)):
                return ParsedMessage(said)
            calls.append(call)
            if written and not written.startswith(("{", ";")):
                return ParsedMessage("", error="nothing may follow a tool call in the same turn")
            written = written.removeprefix(";").lstrip()
        return ParsedMessage("", "", tuple(calls))


def _names_first(text: str) -> bool:
    """Whether this is an object whose first key is "name", complete or not."""
    return text.startswith("{") and text[1:].lstrip().startswith('"name"')


def _object(text: str) -> tuple[str, str]:
    """The first JSON value and what follows it; all of a text that has none."""
    try:
        _, end = _decoder.raw_decode(text)
    except (ValueError, RecursionError):
        return text, ""
    return text[:end], text[end:].lstrip()
