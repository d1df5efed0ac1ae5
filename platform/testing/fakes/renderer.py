"""A renderer over bytes: every byte is a token, and the markers of a conversation are tokens of their own.

::

    [ROLE] text [END]                                   system, user, tool
    [ASSISTANT] [THINK] reasoning [ANSWER] text [CALL] {"name": …, "arguments": {…}} [END]
    [TOOLS] JSON [END]                                  first, where there are tools

Nothing that text can hold becomes a marker, because markers lie above 255.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.platform.contracts import ParsedMessage
from headrace.platform.records.message import Message, ToolCall, ToolSpec
from headrace.platform.records.status import Role

SYSTEM, USER, ASSISTANT, TOOL, TOOLS, END, CALL, THINK, ANSWER = range(256, 265)
VOCABULARY = 265
SPECIAL_TOKENS = tuple(range(256, VOCABULARY))

_HEADER = {Role.SYSTEM: SYSTEM, Role.USER: USER, Role.ASSISTANT: ASSISTANT, Role.TOOL: TOOL}
_NAMES = ("system", "user", "assistant", "tool", "tools", "end", "call", "think", "answer")


class _Call(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: dict[str, Any]


class CharRenderer:
    """See the module; `stop_token_ids` is the end marker."""

    stop_token_ids: tuple[int, ...] = (END,)
    digest = "char-renderer/1"

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """See `Renderer.render`."""
        ids = [TOOLS, *msgspec.json.encode(list(tools)), END] if tools else []
        for message in messages:
            ids += _encoded(message)
        return [*ids, ASSISTANT]

    def bridge(self, messages: Sequence[Message], ended: bool) -> list[int] | None:
        """See `Renderer.bridge`; always exact."""
        ids = [] if ended else [END]
        for message in messages:
            ids += _encoded(message)
        return [*ids, ASSISTANT]

    def parse(self, token_ids: Sequence[int]) -> ParsedMessage:
        """See `Renderer.parse`. An id that is neither a byte nor a marker reads as U+FFFD."""
        ids = list(token_ids)
        if ids and ids[-1] == END:
            ids.pop()
        reasoning, ids = _split_reasoning(ids)
        text, *calls = _split(ids, CALL)
        parsed, errors = [], []
        for number, call in enumerate(calls):
            try:
                read = msgspec.json.decode(_text(call), type=_Call)
                parsed.append(ToolCall(read.name, read.arguments, f"call-{number}"))
            except msgspec.DecodeError as error:
                errors.append(f'a call is {{"name": "…", "arguments": {{…}}}}, but call {number + 1} is not: {error}')
        return ParsedMessage(_text(text), _text(reasoning), tuple(parsed), "; ".join(errors))

    def decode(self, token_ids: Sequence[int]) -> str:
        """See `Renderer.decode`; markers show as <|name|>."""
        return _text(token_ids)


def _encoded(message: Message) -> list[int]:
    ids = [_HEADER[message.role]]
    if message.reasoning:
        ids += [THINK, *message.reasoning.encode(), ANSWER]
    ids += message.content.encode()
    for call in message.tool_calls:
        ids += [CALL, *msgspec.json.encode(_Call(call.name, call.arguments))]
    return [*ids, END]


def _split_reasoning(ids: list[int]) -> tuple[list[int], list[int]]:
    """What was thought and what was said; an unclosed thought is thought to the end (case X2)."""
    if not ids or ids[0] != THINK:
        return [], ids
    end = ids.index(ANSWER) if ANSWER in ids else len(ids)
    return ids[1:end], ids[end + 1 :]


def _split(ids: list[int], marker: int) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    for token in ids:
        if token == marker:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def _text(ids: Sequence[int]) -> str:
    data = bytearray()
    for token in ids:
        if 0 <= token < 256:
            data.append(token)
        elif token in SPECIAL_TOKENS:
            data += f"<|{_NAMES[token - 256]}|>".encode()
        else:
            data += "\ufffd".encode()
    return data.decode("utf-8", errors="replace")
