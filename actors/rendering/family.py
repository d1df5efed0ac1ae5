"""The library's renderer of a family of models, as a `Renderer`.

The library turns messages into tokens as the family's template does, and knows where it would rewrite history. It is
given texts that are cut where a special token could come out of them (case T5). What is sampled is read by our tool
formats, so that a call is read alike whoever renders, and a mistake is explained to the model.
"""

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from headrace.actors.rendering.chat_form import chat_message, chat_tools
from headrace.actors.rendering.library_tokenizer import LibraryTokenizer
from headrace.actors.rendering.plain_text import PlainText
from headrace.actors.rendering.said import THINK, closed_thought, through_stop
from headrace.actors.rendering.tool_formats import ToolFormat
from headrace.platform.contracts import ParsedMessage
from headrace.platform.errors import ConfigError
from headrace.platform.hashing import digest_value
from headrace.platform.records.message import Message, ToolSpec


class FamilyRenderer:
    """A `Renderer` over one of the library.

    Args:
        tokenizer: of the model, for reading.
        inner: the library's renderer; its tokenizer is a `LibraryTokenizer` over the same.
        tool_format: how the family writes tool calls.
        stop_token_ids: what ends a turn.
        thinks: whether its turns may begin with a thought.
        opened: whether its prompts end inside of a thought.
        settings: JSON-safe; what else this renderer depends on.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        inner: Any,
        tool_format: ToolFormat,
        *,
        stop_token_ids: Sequence[int],
        thinks: bool,
        opened: bool,
        settings: Any,
    ) -> None:
        self._tokenizer = tokenizer
        self._inner = inner
        self._cut = PlainText(tokenizer).cut
        self._tool_format = tool_format
        self.stop_token_ids: tuple[int, ...] = tuple(stop_token_ids)
        self._stop_set = frozenset(self.stop_token_ids)
        self.digest = digest_value([tokenizer.to_str(), settings, tool_format.signature, self.stop_token_ids])
        self.thinks = thinks
        self._opened = opened
        self._encode = LibraryTokenizer(tokenizer).encode
        # A conversation to bridge from. What was said makes no difference, as long as no thought is left open.
        self._before = inner.render_ids([{"role": "user", "content": "u"}], add_generation_prompt=True)
        self._cut_off = tokenizer.encode("</think>a" if opened else "a", add_special_tokens=False).ids
        self._ended = [*self._cut_off, inner.get_stop_token_ids()[0]]

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """See `Renderer.render`. Raises ConfigError for what the family's template refuses."""
        return self._ids(messages, tools, speaks=True)

    def said(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int] | None:
        """See `SaysTurns.said`."""
        prompt, whole = self._ids(messages[:-1], tools, speaks=True), self._ids(messages, tools, speaks=False)
        if whole[: len(prompt)] == prompt:
            return through_stop(whole[len(prompt) :], self._stop_set)
        reasoning = messages[-1].reasoning
        if not (self._opened and reasoning):
            return None
        # The prompt opens a thought where the history shows none.
        opening = self._encode(f"{THINK}\n")
        bare = prompt[: -len(opening)]
        turn = whole[len(bare) :]
        if prompt != [*bare, *opening] or whole[: len(bare)] != bare or turn[:1] == opening[:1]:
            return None
        return through_stop([*self._encode(closed_thought(self._cut(reasoning))), *turn], self._stop_set)

    def _ids(self, messages: Sequence[Message], tools: Sequence[ToolSpec], speaks: bool) -> list[int]:
        forms = [chat_message(message, self._cut(message.content), self._cut) for message in messages]
        schemas = chat_tools(tools, self._cut) or None
        try:
            return list(self._inner.render_ids(forms, tools=schemas, add_generation_prompt=speaks))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"this family of models cannot render the conversation: {error}") from error

    def bridge(self, messages: Sequence[Message], ended: bool) -> list[int] | None:
        """See `Renderer.bridge`. None where earlier thoughts would be stripped (case T17), and after a turn that was
        cut off, perhaps in a thought: what closes it depends on what was said."""
        if not ended and self.thinks:
            return None
        said = self._ended if ended else self._cut_off
        forms = [chat_message(message, self._cut(message.content), self._cut) for message in messages]
        bridged = self._inner.bridge_to_next_turn(self._before, said, forms)
        return None if bridged is None else list(bridged.token_ids[len(self._before) + len(said) :])

    def parse(self, token_ids: Sequence[int]) -> ParsedMessage:
        """See `Renderer.parse`."""
        ended = bool(token_ids) and token_ids[-1] in self._stop_set
        return self._tool_format.parse(self.decode(token_ids[:-1] if ended else token_ids))

    def decode(self, token_ids: Sequence[int]) -> str:
        """See `Renderer.decode`."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text
