"""Finite demonstrations: which are kept, which are held out, and in which order they come.

Owns counting and order. What is left out is counted by reason, so that the counts add up: every trace that was made is
trained on, held out, or left out for one reason. A small share is held out by *key* (the same prompt, the same task),
so that the loss measured on it is one on unseen prompts. The rest comes in a new order each epoch, without end, as the
seed says.
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.platform.errors import ConfigError
from headrace.platform.hashing import digest
from headrace.platform.records.arrays import I32, U8
from headrace.platform.seeding import derive_seed
from headrace.trainer.sft import SftTrace

HELD_OUT_SHARE = 0.05
LEAST_KEYS = 10
"""Fewer keys than this are all trained on; there is no held-out loss then."""
MOST_HELD_OUT = 64
"""Keys, not traces."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstrations:
    """`traces` never end. `size` is how many there are in an epoch, None where they are made as they are needed.

    `counts` says how many traces are `kept` (`held_out` ones not among them) and `left_out` by reason; the source adds
    what it read.
    """

    traces: Iterator[SftTrace]
    size: int | None = None
    held_out: tuple[SftTrace, ...] = ()
    counts: dict[str, Any] = field(default_factory=dict)


class Gathering:
    """Takes traces one by one.

    Args:
        max_tokens: longer traces are left out as `too_long`.
        once: leave out a trace that is equal to an earlier one, as `duplicate`.
    """

    def __init__(self, max_tokens: int, *, once: bool = False) -> None:
        self._max_tokens = max_tokens
        self._once = once
        self._seen: set[str] = set()
        self._kept: list[tuple[str, SftTrace]] = []
        self.left_out: Counter[str] = Counter()

    def add(self, key: str, token_ids: Sequence[int] | I32, mask: Sequence[int] | U8) -> None:
        """Consider one trace; `key` says what it is an answer to. What follows the last imitated token is cut off."""
        marks = np.asarray(mask, np.uint8)
        imitated = np.flatnonzero(marks[1:])  # nothing predicts the first token
        if not imitated.size:
            self.left_out["nothing_to_imitate"] += 1
            return
        length = int(imitated[-1]) + 2
        trace = SftTrace(np.array(token_ids[:length], np.int32), marks[:length])
        if length > self._max_tokens:
            self.left_out["too_long"] += 1
        elif self._once and self._is_known(trace):
            self.left_out["duplicate"] += 1
        else:
            self._kept.append((key, trace))

    def _is_known(self, trace: SftTrace) -> bool:
        mark = digest(trace.token_ids.tobytes() + trace.action_mask.tobytes())
        known = mark in self._seen
        self._seen.add(mark)
        return known

    def demonstrations(self, source: str, seed: int, read: dict[str, Any]) -> Demonstrations:
        """What was kept. `read` counts what the source read, for the report.

        Raises:
            ConfigError: nothing was kept; says what became of everything.
        """
        left_out = dict(sorted(self.left_out.items()))
        if not self._kept:
            told = ", ".join(
                f"{count} {reason}" for reason, count in (*read.items(), *left_out.items()) if isinstance(count, int)
            )
            raise ConfigError(f"{source}: no trace is left to imitate ({told}); `max_tokens` is {self._max_tokens}")
        apart = _held_out_keys({key for key, _ in self._kept}, seed)
        held_out = tuple(trace for key, trace in self._kept if key in apart)
        kept = [trace for key, trace in self._kept if key not in apart]
        counts = {**read, "kept": len(kept), "held_out": len(held_out), "left_out": left_out}
        return Demonstrations(traces=_epochs(kept, seed), size=len(kept), held_out=held_out, counts=counts)


def _held_out_keys(keys: set[str], seed: int) -> set[str]:
    if len(keys) < LEAST_KEYS:
        return set()
    count = min(max(1, round(HELD_OUT_SHARE * len(keys))), MOST_HELD_OUT)
    return set(sorted(keys, key=lambda key: derive_seed("held out", seed, key))[:count])


def _epochs(traces: Sequence[SftTrace], seed: int) -> Iterator[SftTrace]:
    """All traces in a new order each epoch, without end."""
    epoch = 0
    while True:
        order = list(range(len(traces)))
        random.Random(derive_seed("sft epoch", seed, epoch)).shuffle(order)
        yield from (traces[index] for index in order)
        epoch += 1
