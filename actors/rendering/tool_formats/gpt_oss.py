"""What gpt-oss says: messages on channels (the harmony format)."""

import re

from headrace.actors.rendering.tool_formats.base import call_with, read_json
from headrace.platform.contracts import ParsedMessage
from headrace.platform.records.message import ToolCall

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_CLOSING = re.compile(r"<\|(?:end|call|return)\|>")
_RECIPIENT = re.compile(r"to=([^\s<]+)")


class GptOssToolFormat:
    """`<|channel|>NAME<|message|>TEXT<|end|>`, and `<|start|>assistant` before every message but the first.

    The channel analysis holds thoughts, final and commentary what is said, and a message `to=functions.NAME` is a call
    whose text is its arguments. What is said on the commentary beside a call counts as thought, for the family's
    template takes one text beside a call.
    """

    signature = "gpt-oss"

    def parse(self, text: str) -> ParsedMessage:
        """See `ToolFormat.parse`."""
        if _MESSAGE not in text and _CHANNEL not in text:
            return ParsedMessage(_CLOSING.sub("", text).strip())
        thought: list[str] = []
        said: list[str] = []
        aside: list[str] = []
        calls: list[ToolCall] = []
        error = ""
        for written in text.split(_START):
            header, opened, body = written.partition(_MESSAGE)
            if not opened:
                # A message that was cut off before it began.
                error = error or (f"a message has no {_MESSAGE}" if header.strip() else "")
                continue
            body = _CLOSING.split(body, maxsplit=1)[0]
            recipient = _RECIPIENT.search(header)
            channel = (header.partition(_CHANNEL)[2].split() or [""])[0]
            if recipient:
                call = _call(recipient.group(1), body, len(calls))
                if isinstance(call, str):
                    error = error or call
                else:
                    calls.append(call)
            else:
                {"analysis": thought, "commentary": aside}.get(channel, said).append(body)
        if calls and not error:
            return ParsedMessage("\n".join(said).strip(), "\n".join([*thought, *aside]).strip(), tuple(calls))
        return ParsedMessage("\n".join([*aside, *said]).strip(), "\n".join(thought).strip(), error=error)


def _call(recipient: str, body: str, index: int) -> ToolCall | str:
    space, _, name = recipient.partition(".")
    if space != "functions" or not name:
        return f"there is no {recipient}; tools are called as functions.NAME"
    try:
        arguments = read_json(body)
    except ValueError as error:
        return f"the arguments of {name} are not valid JSON: {error}"
    return call_with(name, arguments, "arguments", index)
