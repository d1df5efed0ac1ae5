"""What a policy would have sampled to say a message: for demonstrations, which imitate turns that nobody sampled.

A history may show a turn otherwise than it was sampled. The template of gpt-oss ends a turn with another token once it
is history, and leaves thoughts out; that of DeepSeek-R1 shows no thought at all, though its prompts open one. So a turn
is taken from a conversation that ends with it.
"""

from collections.abc import Container, Sequence
from typing import Protocol, runtime_checkable

from headrace.platform.contracts import Renderer
from headrace.platform.records.message import Message, ToolSpec

THINK = "<think>"


@runtime_checkable
class SaysTurns(Renderer, Protocol):
    """A `Renderer` that knows how its turns are sampled. Both of ours do."""

    def said(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int] | None:
        """The tokens that follow `render(messages[:-1], tools)` when the last of `messages`, which is the assistant's,
        is sampled, with the stop token that ends it. None where the template does not show them: what came before is
        written otherwise, no stop token ends the turn, or the prompt opens a thought and the message has none
        (where the template does not write an empty one). What else it leaves out is not looked at: `parse` tells.

        Raises:
            ConfigError: for what `render` refuses.
        """


def closed_thought(reasoning: str) -> str:
    """What ends a thought that a prompt has opened with `THINK` and a newline."""
    return f"{reasoning}\n</think>\n\n"


def through_stop(token_ids: list[int], stops: Container[int]) -> list[int] | None:
    """The tokens up to the first that is one of `stops`, and it; None where none is."""
    end = next((index for index, token_id in enumerate(token_ids) if token_id in stops), None)
    return None if end is None else token_ids[: end + 1]
