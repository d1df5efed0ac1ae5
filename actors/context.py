"""The context: the exact token ids that the model sees, and which turns they came from.

Invariant: within a segment the context only grows, so that what was sampled is what is trained (cases T1, T2). Where
the renderer cannot bridge exactly, the whole conversation is rendered anew and a new segment opens (case T3).
"""

import functools
from array import array
from collections.abc import Callable, Sequence

import numpy as np

from headrace.platform.contracts import Renderer
from headrace.platform.records.arrays import I32
from headrace.platform.records.message import Message, ToolSpec
from headrace.platform.records.turn import Turn, View

Bridge = Callable[[Sequence[Message], bool], list[int] | None]
_INT32 = np.dtype(np.int32)
_SHORT = 64  # characters: longer observations are not likely to come again


class Context:
    """The append-only strategy: everything said so far stays visible."""

    def __init__(self, renderer: Renderer, tools: Sequence[ToolSpec]) -> None:
        self._renderer = renderer
        self.tools = tools
        self._ids = b""  # i32: unchangeable, so that what was asked of an engine can be a view of it
        self._messages: list[Message] = []
        self._first_turn = 0
        self.segment = 0

    def __len__(self) -> int:
        return len(self._ids) // _INT32.itemsize

    def token_ids(self) -> I32:
        """The context as it is now, i32[L], read-only."""
        return np.frombuffer(self._ids, _INT32)

    def open(self, messages: Sequence[Message]) -> I32:
        """Begin with `messages`; returns the prompt's ids."""
        self._messages += messages
        return self._render()

    def take_up(self, messages: Sequence[Message], turns: Sequence[Turn]) -> None:
        """Begin where recorded `turns` ended: with their tokens as they were, and the `messages` that they stand for,
        from which a later segment is rendered."""
        self._messages += messages
        self.segment = turns[-1].segment
        shown = [index for index, turn in enumerate(turns) if turn.segment == self.segment]
        self._first_turn = shown[0]
        self._ids = b"".join(np.asarray(turns[index].token_ids, _INT32).tobytes() for index in shown)

    def said(self, message: Message, token_ids: I32) -> None:
        """The policy sampled `token_ids`, which read as `message`."""
        self._messages.append(message)
        if token_ids.dtype != _INT32:
            token_ids = token_ids.astype(_INT32)
        self._ids += token_ids.tobytes()

    def observed(self, messages: Sequence[Message], ended: bool, next_turn: int) -> I32:
        """The world answered. Returns the ids of the turn that carries the answer, number `next_turn`.

        Args:
            messages: the observations, in order.
            ended: whether the sampled turn before ended with a stop token.
            next_turn: index of the turn that will hold the returned ids.
        """
        self._messages += messages
        is_short = len(messages) == 1 and len(messages[0].content) <= _SHORT and not messages[0].tool_calls
        bridged = (_bridged_once if is_short else _bridged)(self._renderer.bridge, tuple(messages), ended)
        if bridged is not None:
            token_ids, data = bridged
            self._ids += data
            return token_ids
        self.segment += 1
        self._first_turn = next_turn
        return self._render()

    def view(self, turn: int) -> View:
        """What the model sees when it samples turn `turn`."""
        return _view(self._first_turn, turn, self.segment)

    def _render(self) -> I32:
        prompt, self._ids = _i32(self._renderer.render(self._messages, self.tools))
        return prompt


@functools.lru_cache(maxsize=4096)
def _view(first_turn: int, turn: int, segment: int) -> View:
    """Views of this strategy are alike in all episodes, so they share them."""
    return View(turn, ((first_turn, turn),), segment)


def _i32(token_ids: Sequence[int]) -> tuple[I32, bytes]:
    """The ids as an array and as its bytes, which it is a read-only view of."""
    data = array("i", token_ids).tobytes()
    return np.frombuffer(data, _INT32), data


def _bridged(bridge: Bridge, messages: tuple[Message, ...], ended: bool) -> tuple[I32, bytes] | None:
    token_ids = bridge(messages, ended)
    return None if token_ids is None else _i32(token_ids)


# Worlds repeat themselves ("ok", "not found"), and so do the samples of a group: equal short observations share ids.
_bridged_once = functools.lru_cache(maxsize=8192)(_bridged)
