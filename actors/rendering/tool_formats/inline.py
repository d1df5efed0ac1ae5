"""Calls in few tokens, for small models that learn them from scratch."""

from collections.abc import Mapping, Sequence

import msgspec

from headrace.actors.rendering.tool_formats.base import call_id
from headrace.platform.contracts import ParsedMessage
from headrace.platform.records.message import ToolCall


class InlineToolFormat:
    """`<call>NAME ARG ARG</call>`. Arguments are positional, split at spaces."""

    def __init__(self, parameters: Mapping[str, Sequence[str]]) -> None:
        # With the name itself, so that all calls of a tool share one string.
        self._parameters: dict[str, tuple[str, Sequence[str] | None]] = {
            name: (name, names) for name, names in parameters.items()
        }
        self.signature = f"inline {msgspec.json.encode(parameters, order='deterministic').decode()}"

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
            calls.append(ToolCall(name, arguments, call_id(len(calls))))
            if after:
                return ParsedMessage(content, error="nothing may follow a tool call in the same turn")
        return ParsedMessage(content, "", tuple(calls))
