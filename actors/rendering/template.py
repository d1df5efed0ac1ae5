"""Messages to tokens through a chat template, and sampled tokens back to messages.

The template is rendered with a marker in place of every text that came from outside. What stands between markers is
scaffold and may hold special tokens; the texts themselves are encoded as plain text, so that no special token can come
out of a tool (case T5). Sampled tokens are never encoded again: a following turn is *bridged* onto them.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jinja2
import jinja2.sandbox
from tokenizers import Tokenizer

from headrace.actors.rendering.tool_formats import ToolFormat
from headrace.platform.contracts import ParsedMessage
from headrace.platform.hashing import digest_value
from headrace.platform.records.message import Message, ToolSpec
from headrace.platform.records.status import Role

# Private-use characters: no tokenizer vocabulary and no template contains them.
_OPEN, _CLOSE = "\ue000", "\ue001"
# Tools repeat themselves ("ok", "not found"): the ids of texts up to this length are remembered.
_SHORT = 64


class TemplateRenderer:
    """A `Renderer` for any tokenizer and chat template.

    Args:
        tokenizer: text to ids; its special tokens are those that the template may emit.
        template: the Jinja2 chat template, with the variables of Hugging Face templates.
        tool_format: how this model writes tool calls.
        stop_tokens: tokens that end an assistant turn.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: str, tool_format: ToolFormat, stop_tokens: Sequence[str]
    ) -> None:
        self._scaffold = tokenizer
        self._plain = Tokenizer.from_str(tokenizer.to_str())
        self._plain.encode_special_tokens = True
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        self._template = environment.from_string(template)
        self._tool_format = tool_format
        ids = [tokenizer.token_to_id(token) for token in stop_tokens]
        self.stop_token_ids: tuple[int, ...] = tuple(token_id for token_id in ids if token_id is not None)
        self._stop_set = frozenset(self.stop_token_ids)
        self.digest = digest_value([tokenizer.to_str(), template])
        self._short_text = functools.lru_cache(maxsize=8192)(self._plain_ids)
        self._bridge = functools.lru_cache(maxsize=256)(self._bridge_scaffold)

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """See `Renderer.render`."""
        marked = [_marked(message, index) for index, message in enumerate(messages)]
        text = self._apply(marked, tools)
        token_ids: list[int] = []
        for piece in _split(text):
            token_ids += self._encode_plain(messages[piece].content) if isinstance(piece, int) else self._encode(piece)
        return token_ids

    def bridge(self, messages: Sequence[Message], ended: bool) -> list[int] | None:
        """See `Renderer.bridge`."""
        scaffold = self._bridge(tuple((message.role, message.tool_call_id) for message in messages), ended)
        if scaffold is None:
            return None
        token_ids: list[int] = []
        for piece in scaffold:
            token_ids += self._encode_plain(messages[piece].content) if isinstance(piece, int) else piece
        return token_ids

    def parse(self, token_ids: Sequence[int]) -> ParsedMessage:
        """See `Renderer.parse`."""
        ended = bool(token_ids) and token_ids[-1] in self._stop_set
        return self._tool_format.parse(self.decode(token_ids[:-1] if ended else token_ids))

    def decode(self, token_ids: Sequence[int]) -> str:
        """See `Renderer.decode`."""
        text: str = self._scaffold.decode(token_ids, skip_special_tokens=False)
        return text

    def _bridge_scaffold(
        self, roles: tuple[tuple[Role, str], ...], ended: bool
    ) -> tuple[tuple[int, ...] | int, ...] | None:
        """Ids and message indices that follow an assistant turn, or None where the template rewrites history (T3)."""
        opening, said = _marked(Message(Role.USER), len(roles)), _marked(Message(Role.ASSISTANT), len(roles) + 1)
        following = [_marked(Message(role, tool_call_id=call_id), index) for index, (role, call_id) in enumerate(roles)]
        before = self._apply([opening], ()) + said["content"]
        after = self._apply([opening, said, *following], ())
        if not after.startswith(before):
            return None
        pieces = [
            piece if isinstance(piece, int) else tuple(self._encode(piece)) for piece in _split(after[len(before) :])
        ]
        closing = pieces[0] if pieces else ()
        if isinstance(closing, int) or not closing or closing[0] not in self._stop_set:
            return None
        return (closing[1:] if ended else closing, *pieces[1:])

    def _apply(self, messages: Sequence[dict[str, Any]], tools: Sequence[ToolSpec]) -> str:
        schemas = [
            {"type": "function", "function": {"name": t.name, "description": t.description, "parameters": t.parameters}}
            for t in tools
        ]
        return self._template.render(messages=messages, tools=schemas or None, add_generation_prompt=True)

    def _encode(self, text: str) -> list[int]:
        return list(self._scaffold.encode(text, add_special_tokens=False).ids)

    def _encode_plain(self, text: str) -> Sequence[int]:
        return self._short_text(text) if len(text) <= _SHORT else self._plain_ids(text)

    def _plain_ids(self, text: str) -> Sequence[int]:
        return self._plain.encode(text, add_special_tokens=False).ids


def _marked(message: Message, index: int) -> dict[str, Any]:
    """The message as a template sees it, with a marker for its content."""
    marked: dict[str, Any] = {"role": str(message.role), "content": f"{_OPEN}{index}{_CLOSE}"}
    if message.tool_calls:
        marked["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.reasoning:
        marked["reasoning_content"] = message.reasoning
    if message.tool_call_id:
        marked["tool_call_id"] = message.tool_call_id
    return marked


def _split(text: str) -> list[str | int]:
    """Scaffold texts and message indices, in order."""
    pieces: list[str | int] = []
    scaffold, opened, rest = text.partition(_OPEN)
    while True:
        if scaffold:
            pieces.append(scaffold)
        if not opened:
            return pieces
        index, _, rest = rest.partition(_CLOSE)
        pieces.append(int(index))
        scaffold, opened, rest = rest.partition(_OPEN)
