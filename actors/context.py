"""The context: the exact token ids that the model sees, and which turns they came from.

Invariant: within a segment the context only grows, so that what was sampled is what is trained (cases T1, T2). Where
the renderer cannot bridge exactly, the whole conversation is rendered anew and a new segment opens (case T3).
"""

import functools
from array import array
from collections.abc import Sequence

import numpy as np

from headrace.platform.contracts import Renderer
from headrace.platform.records.arrays import I32
from headrace.platform.records.message import Message, ToolSpec
from headrace.platform.records.turn import View

_INT32 = np.dtype(np.int32)


class Context:
    """The append-only strategy: everything said so far stays visible."""

    def __init__(self, renderer: Renderer, tools: Sequence[ToolSpec]) -> None:
        self._renderer = renderer
        self._tools = tools
        self._ids = array("i")
        self._messages: list[Message] = []
        self._first_turn = 0
        self.segment = 0

    def __len__(self) -> int:
        return len(self._ids)

    def token_ids(self) -> I32:
        """A copy of the context, i32[L]."""
        return np.frombuffer(self._ids.tobytes(), _INT32)

    def open(self, messages: Sequence[Message]) -> list[int]:
        """Begin with `messages`; returns the prompt's ids."""
        self._messages += messages
        return self._render()

    def said(self, message: Message, token_ids: I32) -> None:
        """The policy sampled `token_ids`, which read as `message`."""
        self._messages.append(message)
        self._ids.frombytes(token_ids.astype(np.int32, copy=False).tobytes())

    def observed(self, messages: Sequence[Message], ended: bool, next_turn: int) -> list[int]:
        """The world answered. Returns the ids of the turn that carries the answer, number `next_turn`.

        Args:
            messages: the observations, in order.
            ended: whether the sampled turn before ended with a stop token.
            next_turn: index of the turn that will hold the returned ids.
        """
        self._messages += messages
        bridge = self._renderer.bridge(messages, ended)
        if bridge is not None:
            self._ids.extend(bridge)
            return bridge
        self.segment += 1
        self._first_turn = next_turn
        return self._render()

    def view(self, turn: int) -> View:
        """What the model sees when it samples turn `turn`."""
        return _view(self._first_turn, turn, self.segment)

    def _render(self) -> list[int]:
        prompt = self._renderer.render(self._messages, self._tools)
        self._ids = array("i", prompt)
        return prompt


@functools.lru_cache(maxsize=4096)
def _view(first_turn: int, turn: int, segment: int) -> View:
    """Views of this strategy are alike in all episodes, so they share them."""
    return View(turn, ((first_turn, turn),), segment)
