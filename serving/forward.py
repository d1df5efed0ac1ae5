"""One forward pass for the rows of a batch, whatever each of them still has to see.

Owns the arrangement: rows with one new token (decoding) go together, longer ones (prefill) in groups of similar length.
New tokens stand at the right of their group, padding at the left, so the last column is the one to sample from. Padding
writes into the scratch slot and its results are never read. Where the model's attention works in parts, the rows of a
group are sorted by how far they look.
"""

# B rows of a group, T new tokens a row, L positions looked at, V vocabulary

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from headrace.serving.kv_slots import Part, SlotCache
from headrace.serving.masks import MaskPlan
from headrace.serving.sampling import I64
from headrace.serving.slot_attention import NAME, attention_of
from headrace.serving.slot_table import SlotTable

F32 = npt.NDArray[np.float32]
_GROUP_TOKENS = 8192
_PART_ROWS = 8


def groups(lengths: I64) -> Iterator[I64]:
    """Indices of rows that go through the model together: similar in length, bounded in tokens with padding."""
    order = np.argsort(lengths, kind="stable")
    ascending = lengths[order]
    start = 0
    while start < len(order):
        shortest = int(ascending[start])
        widest = 1 if shortest == 1 else 2 * shortest
        end = int(np.searchsorted(ascending, widest, side="right"))
        end = max(start + 1, min(end, start + _GROUP_TOKENS // widest))
        yield order[start:end]
        start = end


def parts(positions: I64) -> Sequence[Part]:
    """Rows whose last `positions` ascend, in parts that look equally far."""
    starts = range(0, len(positions), _PART_ROWS)
    ends = [*starts[1:], len(positions)]
    return [Part(slice(start, end), int(positions[end - 1]) + 1) for start, end in zip(starts, ends, strict=True)]


class ModelRunner:
    """Runs models of one architecture over one table of slots."""

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._cache = SlotCache(table.positions)
        self._masks: MaskPlan | None = None
        self._options: dict[str, Any] = {}
        self._is_split = False

    def logits(self, model: nn.Module, rows: npt.NDArray[Any]) -> F32:
        """Logits [B, V] for the token after each row's position; everything up to there is cached afterwards."""
        slots, positions = rows["slot"].copy(), rows["position"].copy()
        lengths = positions + 1 - self._table.cached[slots]
        if int(lengths.max()) == 1:
            return self._forward(model, slots, positions, lengths)
        found = [
            (group, self._forward(model, slots[group], positions[group], lengths[group])) for group in groups(lengths)
        ]
        result = np.empty((len(rows), found[0][1].shape[1]), np.float32)
        for group, part in found:
            result[group] = part
        return result

    def clear(self, slots: list[int]) -> None:
        """Zero what these slots hold."""
        with torch.inference_mode():
            self._cache.clear(torch.tensor(slots))

    def _forward(self, model: nn.Module, slots: I64, positions: I64, lengths: I64) -> F32:
        if self._masks is None:
            self._masks = self._look_at(model)
        if not self._is_split or len(slots) <= _PART_ROWS:
            look = int(positions.max()) + 1
            return self._run(model, slots, positions, lengths, [Part(slice(0, len(slots)), look)])
        order = np.argsort(positions, kind="stable")
        slots, positions, lengths = slots[order], positions[order], lengths[order]
        found = self._run(model, slots, positions, lengths, parts(positions))
        logits = np.empty_like(found)
        logits[order] = found
        return logits

    def _look_at(self, model: nn.Module) -> MaskPlan:
        if "logits_to_keep" in inspect.signature(model.forward).parameters:
            self._options["logits_to_keep"] = 1
        self._is_split = attention_of(model) == NAME
        return MaskPlan(model, self._table.positions)

    def _run(self, model: nn.Module, slots: I64, positions: I64, lengths: I64, split: Sequence[Part]) -> F32:
        assert self._masks is not None
        width = int(lengths.max())
        columns = np.arange(width - 1, -1, -1)
        at = positions[:, None] - columns
        writes = slots[:, None] * self._table.positions + at
        if width > 1:
            padding = columns >= lengths[:, None]
            at[padding] = 0
            writes[padding] = 0
        with torch.inference_mode():
            step = self._cache.aim(
                torch.from_numpy(slots), torch.from_numpy(writes.reshape(-1)), split, is_split=self._is_split
            )
            if self._is_split:
                self._options["slot_step"] = step
            where = torch.from_numpy(at)
            output = model(
                input_ids=torch.from_numpy(self._table.ids[slots[:, None], at].astype(np.int64)),
                attention_mask=self._masks.build(where, step.length),
                position_ids=where,
                past_key_values=self._cache,
                use_cache=True,
                **self._options,
            )
            logits: F32 = output.logits[:, -1].float().numpy()
        return logits
