"""Messages to tokens and back."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from headrace.platform.records.message import (
    Message,
    ToolCall,
    ToolSpec,
)


class ParsedMessage(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What sampled tokens say. `error` is empty, or explains to the model why its tool call cannot be read."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    error: str = ""


class Renderer(Protocol):
    """Messages to tokens and sampled tokens to messages; one object for training, evaluation and HTTP. What a method
    returns depends on its arguments alone, so that callers may remember it.

    Text that came from outside is encoded as plain text: no special token can come out of a tool (case T5).
    """

    stop_token_ids: tuple[int, ...]
    digest: str

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """The whole prompt, up to and including the header that lets the assistant speak."""

    def bridge(self, messages: Sequence[Message], ended: bool) -> list[int] | None:
        """Tokens that follow a sampled assistant turn: closing it if it has not `ended` with a stop token, then
        `messages`, then the assistant's header. None where this cannot be exact: the caller opens a new segment."""

    def parse(self, token_ids: Sequence[int]) -> ParsedMessage:
        """Read sampled tokens. Never raises: what cannot be read is an `error` for the model (case X1)."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text for people to read."""
