"""Which tokens of a recorded observation are its content, and which are the chat template's.

Nothing is encoded anew into what is trained: a turn is rendered again as one message and must come out as the very
tokens that were recorded. Then what all answers begin and end with, whatever they say, is scaffold. A turn that does
not come out so (several messages, a new segment, a template of another time) tells nothing.
"""

import functools
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path

from headrace.actors.rendering.loading import load_renderer
from headrace.platform.contracts import Renderer
from headrace.platform.errors import ConfigError
from headrace.platform.records.message import Message
from headrace.platform.records.status import Role
from headrace.platform.records.turn import Turn

_PROBES = ("a", "b", "0", "1", "yes", "no", "x1 y2")
_WORDS = 64
"""How many of the vocabulary's own words are tried beside: a small one may know none of the probes."""


class ContentFinder:
    """See the module.

    Args:
        renderer: the run's.

    Raises:
        ConfigError: the chat template hides what a tool says, or writes history anew when one answers.
    """

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        words = [renderer.decode([token_id]) for token_id in range(_WORDS)]
        self._probes = [*_PROBES, *(word for word in words if word.isalnum())]
        self._scaffold = functools.lru_cache(maxsize=4096)(self._scaffold_of)
        if self._scaffold(Role.TOOL, "call_0", True) is None:
            raise ConfigError(
                "learner.environment_loss: the model's chat template hides what a tool says, or writes history anew"
                " when it answers, so that its own words cannot be told; set learner.environment_loss.coefficient=0"
            )

    def span(self, turn: Turn, before: Turn) -> tuple[int, int] | None:
        """The tokens of `turn` that are its content, half-open; `before` is the policy's turn that it answers."""
        token_ids = turn.token_ids.tolist()
        ended = int(before.token_ids[-1]) in self._renderer.stop_token_ids
        message = Message(turn.role, turn.content, tool_call_id=turn.tool_call_id)
        scaffold = self._scaffold(turn.role, turn.tool_call_id, ended)
        if scaffold is None or not turn.content or self._renderer.bridge([message], ended) != token_ids:
            return None
        head, tail = scaffold
        end = len(token_ids) - len(tail)
        fits = len(head) <= end and token_ids[: len(head)] == head and token_ids[end:] == tail
        return (len(head), end) if fits else None

    def _scaffold_of(self, role: Role, tool_call_id: str, ended: bool) -> tuple[list[int], list[int]] | None:
        """What answers begin and end with; None where there is no bridge, or one that hides what is said."""
        probes = [Message(role, text, tool_call_id=tool_call_id) for text in self._probes]
        rendered = [ids for probe in probes if (ids := self._renderer.bridge([probe], ended)) is not None]
        different = {tuple(ids) for ids in rendered}
        if len(different) < 2:
            return None
        head = _common(list(different))
        tail = _common([ids[::-1] for ids in different])[::-1]
        return (head, tail) if all(len(head) + len(tail) < len(ids) for ids in different) else None


def _common(rows: Sequence[Sequence[int]]) -> list[int]:
    """The longest beginning of all rows."""
    columns = zip(*rows, strict=False)
    return [column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns)]


def content_span(wanted: bool, model_dir: str | Path) -> Callable[[Turn, Turn], tuple[int, int] | None] | None:
    """`ContentFinder.span` for a model folder's chat template, where it is wanted. Raises ConfigError."""
    return ContentFinder(load_renderer(model_dir)).span if wanted else None
