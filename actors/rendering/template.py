"""Messages to tokens through a chat template, and sampled tokens back to messages.

The template is rendered with a marker in place of every text that came from outside. What stands between markers is
scaffold and may hold special tokens; the texts themselves are encoded as plain text, so that no special token can come
out of a tool (case T5). Sampled tokens are never encoded again: a following turn is *bridged* onto them.
"""

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import jinja2
import jinja2.sandbox
import msgspec
from tokenizers import Tokenizer

from headrace.actors.rendering.plain_text import CLOSE, CUT, OPEN, PlainText
from headrace.actors.rendering.tool_formats import ToolFormat
from headrace.platform.contracts import ParsedMessage
from headrace.platform.hashing import digest_value
from headrace.platform.records.message import Message, ToolSpec
from headrace.platform.records.status import Role

# Ids of scaffold, and indices of the messages whose texts stand between.
Scaffold = tuple[tuple[int, ...] | int, ...]
Signature = tuple[tuple[Role, str], ...]
_encode_json = msgspec.json.Encoder(order="deterministic").encode
_decode_tools = msgspec.json.Decoder(tuple[ToolSpec, ...]).decode


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
        self._plain = PlainText(tokenizer)
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = _tojson
        self._template = environment.from_string(template)
        self._tool_format = tool_format
        ids = [tokenizer.token_to_id(token) for token in stop_tokens]
        self.stop_token_ids: tuple[int, ...] = tuple(token_id for token_id in ids if token_id is not None)
        self._stop_set = frozenset(self.stop_token_ids)
        self.digest = digest_value([tokenizer.to_str(), template])
        self._bridge = functools.lru_cache(maxsize=256)(self._bridge_scaffold)
        self._prompt = functools.lru_cache(maxsize=256)(self._prompt_scaffold)
        # The decoder of word tokenizers only joins; a table then decodes without a call into the library.
        joins = type(tokenizer.decoder).__name__ == "Fuse"
        self._words = [tokenizer.id_to_token(i) or "" for i in range(tokenizer.get_vocab_size())] if joins else None

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """See `Renderer.render`."""
        if any(message.tool_calls or message.reasoning for message in messages):
            scaffold = self._encoded(self._apply([self._marked(m, i) for i, m in enumerate(messages)], tools))
        else:
            signature = tuple((message.role, message.tool_call_id) for message in messages)
            scaffold = self._prompt(signature, _encode_json(tools))
        return self._filled(scaffold, messages)

    def bridge(self, messages: Sequence[Message], ended: bool) -> list[int] | None:
        """See `Renderer.bridge`."""
        scaffold = self._bridge(tuple([(message.role, message.tool_call_id) for message in messages]), ended)
        return None if scaffold is None else self._filled(scaffold, messages)

    def parse(self, token_ids: Sequence[int]) -> ParsedMessage:
        """See `Renderer.parse`."""
        ended = bool(token_ids) and token_ids[-1] in self._stop_set
        return self._tool_format.parse(self.decode(token_ids[:-1] if ended else token_ids))

    def decode(self, token_ids: Sequence[int]) -> str:
        """See `Renderer.decode`."""
        if (words := self._words) is not None:
            try:
                return "".join([words[token_id] for token_id in token_ids])
            except IndexError:  # an id beyond the vocabulary, which the library leaves out
                pass
        text: str = self._scaffold.decode(token_ids, skip_special_tokens=False)
        return text

    def _prompt_scaffold(self, roles: Signature, tools: bytes) -> Scaffold:
        marked = [self._marked(Message(role, tool_call_id=call_id), i) for i, (role, call_id) in enumerate(roles)]
        return self._encoded(self._apply(marked, _decode_tools(tools)))

    def _bridge_scaffold(self, roles: Signature, ended: bool) -> Scaffold | None:
        """Ids and message indices that follow an assistant turn, or None where the template rewrites history, be it
        what was said or what was thought before it (cases T3, T17)."""
        opening = self._marked(Message(Role.USER), len(roles))
        said = self._marked(Message(Role.ASSISTANT), len(roles) + 1)
        following = [self._marked(Message(role, tool_call_id=call_id), i) for i, (role, call_id) in enumerate(roles)]
        header = self._apply([opening], ())
        tails = set()
        for content in (said["content"], f"<think>\n{said['content']}\n</think>\n\n{said['content']}"):
            after = self._apply([opening, {**said, "content": content}, *following], ())
            if not after.startswith(header + content):
                return None
            tails.add(after[len(header + content) :])
        if len(tails) > 1:
            return None
        pieces = self._encoded(tails.pop())
        closing = pieces[0] if pieces else ()
        if isinstance(closing, int) or not closing or closing[0] not in self._stop_set:
            return None
        return (closing[1:] if ended else closing, *pieces[1:])

    def _marked(self, message: Message, index: int) -> dict[str, Any]:
        """The message as a template sees it, with a marker for its content. Its other texts pass through, cut."""
        cut = self._plain.cut
        marked: dict[str, Any] = {"role": str(message.role), "content": f"{OPEN}{index}{CLOSE}"}
        if message.tool_calls:
            marked["tool_calls"] = [
                {
                    "id": cut(call.call_id),
                    "type": "function",
                    "function": {"name": cut(call.name), "arguments": _each_text(call.arguments, cut)},
                }
                for call in message.tool_calls
            ]
        if message.reasoning:
            marked["reasoning_content"] = cut(message.reasoning)
        if message.tool_call_id:
            marked["tool_call_id"] = cut(message.tool_call_id)
        return marked

    def _apply(self, messages: Sequence[dict[str, Any]], tools: Sequence[ToolSpec]) -> str:
        schemas = [
            {"type": "function", "function": {"name": t.name, "description": t.description, "parameters": t.parameters}}
            for t in tools
        ]
        return self._template.render(messages=messages, tools=schemas or None, add_generation_prompt=True)

    def _encoded(self, text: str) -> Scaffold:
        """A marked text as ids and message indices."""
        return tuple(
            piece
            if isinstance(piece, int)
            else tuple(
                i for part in piece.split(CUT) for i in self._scaffold.encode(part, add_special_tokens=False).ids
            )
            for piece in _split(text)
        )

    def _filled(self, scaffold: Scaffold, messages: Sequence[Message]) -> list[int]:
        token_ids: list[int] = []
        for piece in scaffold:
            token_ids += self._plain.encode(messages[piece].content) if isinstance(piece, int) else piece
        return token_ids


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with every string in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _each_text(each, change) for key, each in value.items()}
    return [_each_text(each, change) for each in value] if isinstance(value, list | tuple) else value


def _tojson(value: Any, indent: int | None = None) -> str:
    """JSON as chat templates mean it; that of Jinja escapes for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _split(text: str) -> list[str | int]:
    """Scaffold texts and message indices, in order."""
    pieces: list[str | int] = []
    scaffold, opened, rest = text.partition(OPEN)
    while True:
        if scaffold:
            pieces.append(scaffold)
        if not opened:
            return pieces
        index, _, rest = rest.partition(CLOSE)
        pieces.append(int(index))
        scaffold, opened, rest = rest.partition(OPEN)
