"""Keys and values of many sessions in one preallocated buffer a layer, behind the cache interface of transformers.

Owns the tensors, not who may use them (`slot_table.py` does). A buffer is [slots, positions, heads, width]; slot 0 is
scratch, where padding writes. Invariants: what was never written is zero, so a masked position adds exactly nothing;
keys are stored with their position in them, so a position means the same in every batch.
"""

# B rows, T new tokens a row, L positions looked at, H heads, W width of a head, S slots, P positions of a slot

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

_FIRST_SLOTS = 16


class Part(NamedTuple):
    """Rows of a batch that are attended to together, and L for them."""

    rows: slice
    length: int


class Step:
    """Where the present forward pass reads and writes; shared by all layers. With `is_split` a layer gives its buffers
    away as they are, and the attention gathers the `parts` itself; else all rows are one part."""

    def __init__(self, positions: int) -> None:
        self.positions = positions
        self.capacity = _FIRST_SLOTS
        self.length = 0
        self.parts: Sequence[Part] = ()
        self.is_split = False
        self.slots = torch.empty(0, dtype=torch.int64)
        self.writes = torch.empty(0, dtype=torch.int64)
        self._work: list[torch.Tensor] = [torch.empty(0), torch.empty(0)]

    def gather(self, buffer: torch.Tensor, which: int, part: Part) -> torch.Tensor:
        """[B, H, L, W] of the part's slots, in a work buffer that the next part overwrites: fresh memory at every
        layer of every step would cost more than the copy."""
        slots, (heads, width) = self.slots[part.rows], buffer.shape[2:]
        needed = len(slots) * part.length * heads * width
        if self._work[which].numel() < needed:
            self._work[which] = torch.empty(needed, dtype=buffer.dtype)
        out = self._work[which][:needed].view(len(slots), part.length, heads, width)
        torch.index_select(buffer[:, : part.length], 0, slots, out=out)
        return out.transpose(1, 2)


class _SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # transformers is typed in part
    """One layer's keys and values of all slots."""

    def __init__(self, step: Step) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._step = step

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make the buffers, in the shape of the first states [B, H, T, W]."""
        self.keys, self.values = (
            states.new_zeros(self._step.capacity, self._step.positions, states.shape[1], states.shape[3])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new states [B, H, T, W] and return all that the rows may look at, [B, H, L, W], or the buffers of a
        step that is split."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self.buffers
        if len(keys) < self._step.capacity:
            keys, values = self.keys, self.values = (
                _grown(keys, self._step.capacity),
                _grown(values, self._step.capacity),
            )
        _store(keys, self._step.writes, key_states)
        _store(values, self._step.writes, value_states)
        if self._step.is_split:
            return keys, values
        (part,) = self._step.parts
        return self._step.gather(keys, 0, part), self._step.gather(values, 1, part)

    @property
    def buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all slots, [S, P, H, W] each."""
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The length and offset of what `update` returns."""
        return self._step.length, 0

    def get_seq_length(self) -> int:
        """Zero: rows differ in length, and positions are always given."""
        return 0

    def get_max_length(self) -> int:
        """The positions of a slot."""
        return self._step.positions


def _store(buffer: torch.Tensor, writes: torch.Tensor, states: torch.Tensor) -> None:
    rows = states.transpose(1, 2)
    buffer.view(-1, *buffer.shape[2:]).index_copy_(0, writes, rows.reshape(-1, *buffer.shape[2:]))


def _grown(buffer: torch.Tensor, capacity: int) -> torch.Tensor:
    larger = buffer.new_zeros(capacity, *buffer.shape[1:])
    larger[: len(buffer)] = buffer
    return larger


class SlotCache(Cache):
    """A transformers cache over slots. Works for any causal model that keeps plain keys and values of full attention.

    Args:
        positions: the longest context of a slot, in tokens.
    """

    def __init__(self, positions: int) -> None:
        self._step = Step(positions)
        self._made: list[_SlotLayer] = []
        super().__init__(layer_class_to_replicate=cast(type[CacheLayerMixin], self._make_layer))

    def aim(self, slots: torch.Tensor, writes: torch.Tensor, parts: Sequence[Part], *, is_split: bool) -> Step:
        """Set up the next forward pass.

        Args:
            slots: i64 [B], the slot of each row.
            writes: i64 [B * T], `slot * positions + position` for each new token; 0 for padding.
            parts: all rows, in order; those of a part look at positions below its length.
            is_split: see `Step`.
        """
        needed = int(slots.max()) + 1
        while self._step.capacity < needed:
            self._step.capacity *= 2
        self._step.slots, self._step.writes = slots, writes
        self._step.parts, self._step.is_split = parts, is_split
        self._step.length = max(part.length for part in parts)
        return self._step

    def clear(self, slots: torch.Tensor) -> None:
        """Zero these slots, so that numbers that are not finite cannot reach their next owner."""
        for layer in self._made:
            for buffer in layer.buffers:
                buffer[slots] = 0.0

    def _make_layer(self) -> _SlotLayer:
        layer = _SlotLayer(self._step)
        self._made.append(layer)
        return layer
