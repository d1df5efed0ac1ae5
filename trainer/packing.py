"""Microbatches without padding: samples one after the other in one row, what they begin with in common computed once.

Owns the layout of a row and where each token of a sample lies in it. A token that several samples share lies there
once, and each of them has its own mask, advantage and loss for it: gradients flow into it from all. Loss tokens come in
the order of samples and, within one, of tokens, and are *selected*, so that nothing at another position reaches the
loss (case T9); there is no padding (case T10). What is in which row depends on the samples alone, not on their order
of arrival, and the loss is a mean over the whole step (case V6).

Dimensions: S tokens of the row, M tokens of all samples (S <= M), N chosen tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.platform.records.arrays import I32
from headrace.trainer.batch import LossTokens
from headrace.trainer.packed_attention import Part, causal_parts
from headrace.trainer.samples import Sample
from headrace.trainer.shared_prefix import Bundle, bundles, singles


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatch:
    """One forward pass over `rows` without padding.

    Of the row: token_ids and position_ids i64[S], and who sees whom. Of the samples' tokens, one sample after the
    other: place i64[M] in the row, row i64[M] (an index into `rows`), column i64[M] (the position in its sample),
    targets i64[M] (the token itself), loss_mask bool[M], behaviour_logprobs, advantages and temperatures f32[M].
    """

    rows: tuple[Sample, ...]
    token_ids: Tensor
    position_ids: Tensor
    parts: tuple[Part, ...]
    place: Tensor
    row: Tensor
    column: Tensor
    targets: Tensor
    loss_mask: Tensor
    behaviour_logprobs: Tensor
    advantages: Tensor
    temperatures: Tensor

    @property
    def predicted(self) -> Tensor:
        """bool[M]: every token but each sample's first, which nothing predicts."""
        return self.column > 0

    def by_sample(self, values: Tensor) -> list[Tensor]:
        """Values [M], one for each token, as one tensor for each of `rows`."""
        return list(torch.split(values, [row.length for row in self.rows]))

    def loss_tokens(self, step_tokens: int) -> LossTokens:
        """The tokens that enter the loss, sample by sample."""
        return LossTokens(
            rows=self.rows,
            row=self.row[self.loss_mask],
            column=self.column[self.loss_mask],
            behaviour_logprobs=self.behaviour_logprobs[self.loss_mask],
            advantages=self.advantages[self.loss_mask],
            step_tokens=step_tokens,
        )


def pack_tokens(samples: Sequence[Sample], microbatch_tokens: int, share_prefixes: bool) -> list[PackedBatch]:
    """Rows of at most `microbatch_tokens` tokens each. A longer sample gets a row of its own: it is never cut."""
    given = bundles(samples, microbatch_tokens) if share_prefixes else singles(samples)
    batches: list[PackedBatch] = []
    taken: list[Bundle] = []
    filled = 0
    for bundle in given:
        if taken and filled + bundle.computed > microbatch_tokens:
            batches.append(_packed(taken))
            taken, filled = [], 0
        taken.append(bundle)
        filled += bundle.computed
    if taken:
        batches.append(_packed(taken))
    return batches


def _packed(taken: Sequence[Bundle]) -> PackedBatch:
    rows = [sample for bundle in taken for sample in bundle.rows]
    pieces = [piece for bundle in taken for piece in _pieces(bundle)]
    starts = [0, *np.cumsum([len(ids) for ids, _ in pieces]).tolist()]
    lengths = np.array([sample.length for sample in rows])
    return PackedBatch(
        rows=tuple(rows),
        token_ids=torch.from_numpy(np.concatenate([ids for ids, _ in pieces]).astype(np.int64)),
        position_ids=torch.from_numpy(np.concatenate([np.arange(len(ids)) + begin for ids, begin in pieces])),
        parts=tuple(_parts(taken, starts)),
        place=torch.from_numpy(np.concatenate(list(_places(taken, starts)))),
        row=torch.from_numpy(np.repeat(np.arange(len(rows)), lengths)),
        column=torch.from_numpy(np.concatenate([np.arange(length) for length in lengths])),
        targets=torch.from_numpy(np.concatenate([sample.token_ids for sample in rows]).astype(np.int64)),
        loss_mask=torch.from_numpy(np.concatenate([sample.loss_mask for sample in rows]).astype(np.bool_)),
        behaviour_logprobs=torch.from_numpy(np.concatenate([sample.behaviour_logprobs for sample in rows])),
        advantages=torch.from_numpy(np.concatenate([sample.advantages for sample in rows])),
        temperatures=torch.from_numpy(np.concatenate([sample.temperatures for sample in rows])),
    )


def _pieces(bundle: Bundle) -> Iterator[tuple[I32, int]]:
    """What of a bundle lies in the row, in order: tokens and the position of their first."""
    yield bundle.rows[0].token_ids[: bundle.shared], 0
    for sample in bundle.rows:
        yield sample.token_ids[bundle.shared :], bundle.shared


def _parts(taken: Sequence[Bundle], starts: Sequence[int]) -> Iterator[Part]:
    """Causal parts first: a whole one is merged into them."""
    pieces = [causal_parts(first, last) for first, last in pairwise(starts) if first < last]
    yield from (part for causal, _ in pieces for part in causal)
    yield from (part for _, whole in pieces for part in whole)
    index = 0
    for bundle in taken:
        prefix, own, end = starts[index], starts[index + 1], starts[index + 1 + len(bundle.rows)]
        if prefix < own < end:
            yield Part(own, end, prefix, own, causal=False)
        index += 1 + len(bundle.rows)


def _places(taken: Sequence[Bundle], starts: Sequence[int]) -> Iterator[npt.NDArray[np.int64]]:
    """For each sample, where in the row its tokens lie."""
    index = 0
    for bundle in taken:
        prefix = np.arange(starts[index], starts[index + 1])
        for piece in range(index + 1, index + 1 + len(bundle.rows)):
            yield np.concatenate([prefix, np.arange(starts[piece], starts[piece + 1])])
        index += 1 + len(bundle.rows)
