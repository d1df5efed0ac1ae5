"""Messages to tokens through a chat template, and sampled tokens back to messages.

A text from outside is encoded as plain text, so that no special token can come out of a tool (case T5). Where the
template shows contents as they are, it is rendered with a marker in place of each, and what stands between markers is
scaffold that is worked out once. Where it changes them (trims, quotes), it is given the contents themselves, cut.
Sampled tokens are never encoded again: a following turn is *bridged* onto them.
"""

import datetime
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from tokenizers import Tokenizer

from headrace.actors.rendering.chat_form import chat_message, chat_tools
from headrace.actors.rendering.chat_template import DEFAULT_DAY, ChatTemplate
from headrace.actors.rendering.plain_text import CLOSE, CUT, OPEN, PlainText
from headrace.actors.rendering.said import THINK, closed_thought, through_stop
from headrace.actors.rendering.tool_formats import ToolFormat
from headrace.platform.contracts import ParsedMessage
from headrace.platform.errors import ConfigError
from headrace.platform.hashing import digest_value
from headrace.platform.records.message import Message, ToolCall, ToolSpec
from headrace.platform.records.status import Role

# Ids of scaffold, and indices of the messages whose texts stand between.
Scaffold = tuple[tuple[int, ...] | int, ...]
# Role, call that is answered, and whether there is a content.
Signature = tuple[tuple[Role, str, bool], ...]
# In the order of their keys, which prompts show.
_encode_json = msgspec.json.Encoder().encode
_decode_tools = msgspec.json.Decoder(tuple[ToolSpec, ...]).decode
_NO_SETTINGS: Mapping[str, Any] = {}
# What a template that touches contents does not leave alone: space at the ends, quotes, a backslash, letters.
_TOUCHY = " \n\"É\\n' &<x> "


class TemplateRenderer:
    """A `Renderer` for any tokenizer and chat template.

    Args:
        tokenizer: text to ids; its special tokens are those that the template may emit.
        template: the Jinja2 chat template, with the variables of Hugging Face templates.
        tool_format: how this model writes tool calls.
        stop_tokens: tokens that end an assistant turn.
        variables: what else the template sees; JSON-safe.
        day: what the template takes for today.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str,
        tool_format: ToolFormat,
        stop_tokens: Sequence[str],
        variables: Mapping[str, Any] = _NO_SETTINGS,
        day: datetime.date = DEFAULT_DAY,
    ) -> None:
        self._scaffold = tokenizer
        self._plain = PlainText(tokenizer)
        self._template = ChatTemplate(template, variables, day)
        self._tool_format = tool_format
        ids = [tokenizer.token_to_id(token) for token in stop_tokens]
        self.stop_token_ids: tuple[int, ...] = tuple(token_id for token_id in ids if token_id is not None)
        self._stops = tuple(stop_tokens)
        self._stop_set = frozenset(self.stop_token_ids)
        settings = [dict(variables), day.isoformat(), tool_format.signature, self.stop_token_ids]
        self.digest = digest_value([tokenizer.to_str(), template, *settings])
        self._bridge = functools.lru_cache(maxsize=256)(self._bridge_of)
        self._prompt = functools.lru_cache(maxsize=256)(self._prompt_of)
        self._orphans_are_refused = self._show([Message(Role.USER, "u"), _SAID, Message(Role.TOOL, "t")]) is None
        self._drops_thoughts = not any(_MARK in (self._show(opening) or "") for opening in _THINKING)
        self._touched = frozenset(role for role in _OPENINGS if self._touches(role))
        # The decoder of word tokenizers only joins; a table then decodes without a call into the library.
        joins = type(tokenizer.decoder).__name__ == "Fuse"
        self._words = [tokenizer.id_to_token(i) or "" for i in range(tokenizer.get_vocab_size())] if joins else None

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """See `Renderer.render`. Raises ConfigError for what the template refuses."""
        for message in messages:
            if message.tool_calls or message.reasoning or message.role in self._touched:
                return self._filled(self._encoded(self._text(messages, tools)), messages)
        signature = tuple([(message.role, message.tool_call_id, message.content != "") for message in messages])
        return self._filled(self._prompt(signature, _encode_json(tools)), messages)

    def bridge(self, messages: Sequence[Message], ended: bool) -> list[int] | None:
        """See `Renderer.bridge`."""
        signature = tuple([(message.role, message.tool_call_id, message.content != "") for message in messages])
        scaffold = self._bridge(signature, ended)
        if not scaffold:
            return None if scaffold is None else self._bridge_as_written(messages, ended)
        return self._filled(scaffold, messages)

    def parse(self, token_ids: Sequence[int]) -> ParsedMessage:
        """See `Renderer.parse`."""
        ended = bool(token_ids) and token_ids[-1] in self._stop_set
        return self._tool_format.parse(self.decode(token_ids[:-1] if ended else token_ids))

    def said(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int] | None:
        """See `SaysTurns.said`."""
        for start in (0, len(messages) - 1):  # in its conversation, or alone where the template rewrites that
            before = messages[start:-1] or (Message(Role.USER, "u"),)
            if (turn := self._turn(before, messages[-1], tools)) is not None:
                pieces = self._encoded(turn)
                return through_stop(self._filled(pieces, [*before, messages[-1]]), self._stop_set)
        return None

    def decode(self, token_ids: Sequence[int]) -> str:
        """See `Renderer.decode`."""
        if (words := self._words) is not None:
            try:
                return "".join([words[token_id] for token_id in token_ids])
            except IndexError:  # an id beyond the vocabulary, which the library leaves out
                pass
        text: str = self._scaffold.decode(token_ids, skip_special_tokens=False)
        return text

    def _text(self, messages: Sequence[Message], tools: Sequence[ToolSpec], speaks: bool = True) -> str:
        """The prompt as the template writes it, with marks for contents and cuts."""
        return self._template.apply(self._forms(messages), chat_tools(tools, self._plain.cut), speaks)

    def _turn(self, before: Sequence[Message], message: Message, tools: Sequence[ToolSpec]) -> str | None:
        """What the template puts after the prompt `before`, once the turn that follows is there; None where it writes
        `before` otherwise then. A prompt that opens a thought is told from a template that shows none."""
        prompt, whole = self._text(before, tools), self._text([*before, message], tools, speaks=False)
        if whole.startswith(prompt):
            return whole[len(prompt) :]
        bare, opened, _ = prompt.rpartition(THINK)
        if not opened or not prompt.rstrip().endswith(THINK) or not message.reasoning:
            return None
        whole = self._text([*before, msgspec.structs.replace(message, reasoning="")], tools, speaks=False)
        turn = whole[len(bare) :]
        if not whole.startswith(bare) or turn.startswith(THINK):
            return None
        return closed_thought(self._plain.cut(message.reasoning)) + turn

    def _prompt_of(self, signature: Signature, tools: bytes) -> Scaffold:
        return self._encoded(self._text(_messages(signature), _decode_tools(tools)))

    def _bridge_of(self, signature: Signature, ended: bool) -> Scaffold | None:
        """Ids and message indices that follow an assistant turn, or None where the template rewrites history, be it
        what was said or what was thought before it (cases T3, T17). Nothing where contents are changed."""
        following = _messages(signature)
        forms, calls = self._forms(following), _answered(following)
        thought = f"<think>\n{_MARK}\n</think>\n\n{_MARK}"
        try:
            tail = self._tail(_MARK, calls, forms)
            if tail is None or tail != self._tail(thought, calls, forms):
                return None
            if calls:
                # The token that ends the turn must not be the one that ends the first result.
                marked = self._tail(_MARK, calls, [{**forms[0], "content": _MARK}, *forms[1:]])
                if marked is None or _MARK not in marked:
                    return None
        except ConfigError:
            return None
        touched = any(message.role in self._touched for message in following)
        return () if touched else self._closing(tail, ended)

    def _bridge_as_written(self, messages: Sequence[Message], ended: bool) -> list[int] | None:
        """A bridge whose contents the template changes. Whether there is one does not depend on them."""
        tail = self._tail(_MARK, _answered(messages), self._forms(messages))
        scaffold = self._closing(tail, ended)
        return None if scaffold is None else self._filled(scaffold, messages)

    def _tail(self, said: str, calls: tuple[ToolCall, ...], following: Sequence[dict[str, Any]]) -> str | None:
        """What the template puts after a turn that is sampled as `said` and then calls, from the token on that ends it;
        None where it does not keep the turn, or ends it with no such token."""
        turn = chat_message(Message(Role.ASSISTANT, tool_calls=calls), said, str)
        before = self._template.apply([_OPENING], ()) + said
        after = self._template.apply([_OPENING, turn, *following], ())
        if not after.startswith(before):
            return None
        ends = min((at for at in (after.find(stop, len(before)) for stop in self._stops) if at >= 0), default=None)
        return None if ends is None or (not calls and ends > len(before)) else after[ends:]

    def _closing(self, tail: str | None, ended: bool) -> Scaffold | None:
        """Such a tail as ids and message indices, with the token that ends the turn if it has not `ended`."""
        pieces = self._encoded(tail or "")
        closing = pieces[0] if pieces else 0
        if isinstance(closing, int) or closing[0] not in self._stop_set:
            return None
        return (closing[1:] if ended else closing, *pieces[1:])

    def _forms(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        return [self._marked(message, index) for index, message in enumerate(messages)]

    def _marked(self, message: Message, index: int) -> dict[str, Any]:
        """The message as the template sees it: a marker for its content, or where the template touches contents of
        this role the content itself, cut."""
        cut = self._plain.cut
        is_shown = message.content and message.role not in self._touched
        content = f"{OPEN}{index}{CLOSE}" if is_shown else cut(message.content)
        if message.reasoning and self._drops_thoughts:
            content = f"<think>\n{cut(message.reasoning)}\n</think>\n\n{content}"
        form = chat_message(message, content, cut)
        if self._orphans_are_refused and message.role is Role.TOOL and not message.tool_call_id:
            form["role"] = "user"  # tells the model that its call cannot be read (case X1)
        return form

    def _show(self, messages: Sequence[Message]) -> str | None:
        """What the template makes of these texts as they are; None where it refuses."""
        try:
            return self._template.apply([chat_message(m, m.content, str) for m in messages], ())
        except ConfigError:
            return None

    def _touches(self, role: Role) -> bool:
        """Whether the template shows contents of a role otherwise than they are, or not at all times."""
        marked, touchy = (
            self._show([msgspec.structs.replace(m, content=text) if m.role is role else m for m in _OPENINGS[role]])
            for text in (_MARK, _TOUCHY)
        )
        return marked is None or touchy != marked.replace(_MARK, _TOUCHY)

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


# A marker that stands for no message.
_MARK = f"{OPEN}0{CLOSE}"
_OPENING = {"role": "user", "content": "u"}
_SAID = Message(Role.ASSISTANT, "s")
_CALLED = Message(Role.ASSISTANT, tool_calls=(ToolCall("f", {}, "call_0"),))
_ANSWERED = Message(Role.TOOL, "t", tool_call_id="call_0")
# For each role a conversation that it is part of, once.
_OPENINGS = {
    Role.SYSTEM: [Message(Role.SYSTEM), Message(Role.USER, "u")],
    Role.USER: [Message(Role.USER)],
    Role.ASSISTANT: [Message(Role.USER, "u"), Message(Role.ASSISTANT)],
    Role.TOOL: [Message(Role.USER, "u"), _CALLED, _ANSWERED],
}
# Where a template that shows thoughts at all shows them.
_THINKING = (
    [Message(Role.USER, "u"), msgspec.structs.replace(_SAID, reasoning=_MARK)],
    [Message(Role.USER, "u"), msgspec.structs.replace(_CALLED, reasoning=_MARK), _ANSWERED],
)


def _messages(signature: Signature) -> list[Message]:
    """Messages of such a signature."""
    return [Message(role, "c" if has_content else "", "", (), call_id) for role, call_id, has_content in signature]


def _answered(messages: Sequence[Message]) -> tuple[ToolCall, ...]:
    """Calls that these results answer."""
    return tuple([ToolCall("f", {}, m.tool_call_id) for m in messages if m.role is Role.TOOL and m.tool_call_id])


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
