"""Samples to tensors: padded microbatches, and the loss tokens that an algorithm sees.

Padding is for models that cannot compute samples in one row (`packing.py` has the others), and for comparison.
Owns the choice of positions. A token that does not enter the loss is never touched by arithmetic: loss tokens are
*selected*, not multiplied by a mask, so that NaN at another position reaches neither loss nor gradient (case T9) and
padding may hold anything (case T10). The order of packing depends on the samples alone, not on their order of arrival,
and the loss is a mean over the whole step, so that microbatches add up exactly (case V6).

Dimensions: B samples of a microbatch, T tokens of its longest sample, N loss tokens of a microbatch.
Position t of a mask speaks of token t; its logits come from position t - 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from headrace.trainer.samples import Sample


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """One forward pass: `rows` are the samples, shorter ones padded on the right.

    token_ids i64[B, T]; is_token and loss_mask bool[B, T], false in the padding; behaviour_logprobs, advantages and
    temperatures f32[B, T].
    """

    rows: tuple[Sample, ...]
    token_ids: Tensor
    is_token: Tensor
    loss_mask: Tensor
    behaviour_logprobs: Tensor
    advantages: Tensor
    temperatures: Tensor

    @property
    def predicted(self) -> Tensor:
        """bool[B, T]: every token but each sample's first, which nothing predicts."""
        predicted = self.is_token.clone()
        predicted[:, 0] = False
        return predicted

    def by_sample(self, values: Tensor) -> list[Tensor]:
        """Values [B, T], one for each token, as one tensor for each of `rows`."""
        return [values[b, : row.length] for b, row in enumerate(self.rows)]

    def loss_tokens(self, step_tokens: int) -> "LossTokens":
        """The tokens that enter the loss, in row-major order."""
        row_N, column_N = torch.nonzero(self.loss_mask, as_tuple=True)
        return LossTokens(
            rows=self.rows,
            row=row_N,
            column=column_N,
            behaviour_logprobs=self.behaviour_logprobs[self.loss_mask],
            advantages=self.advantages[self.loss_mask],
            step_tokens=step_tokens,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LossTokens:
    """What an algorithm's loss sees of a microbatch: row i64[N] (an index into `rows`), column i64[N] (the token's
    position in its row), behaviour_logprobs f32[N], advantages f32[N]. `step_tokens` counts the loss tokens of the
    whole optimizer step: divide by it."""

    rows: tuple[Sample, ...]
    row: Tensor
    column: Tensor
    behaviour_logprobs: Tensor
    advantages: Tensor
    step_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOutput:
    """What an algorithm's loss returns: the scalar to differentiate (this microbatch's share of the step's mean) and,
    without gradient, per loss token ratio f32[N], clipped bool[N] and kl f32[N]. `sums` are further figures by name,
    summed over the microbatch's loss tokens: the step reports their means."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor
    kl: Tensor
    sums: dict[str, float] = field(default_factory=dict)


def step_tokens(samples: Sequence[Sample]) -> int:
    """Loss tokens of an optimizer step: the denominator of its mean."""
    return sum(sample.loss_tokens for sample in samples)


def pack(samples: Sequence[Sample], microbatch_tokens: int) -> list[MicroBatch]:
    """Microbatches in order of length, each at most `microbatch_tokens` padded tokens.

    A sample that is longer than that by itself gets a microbatch of its own: it is never cut.
    """
    ordered = sorted(samples, key=lambda s: (s.length, s.episode_id, s.agent_id, s.segment))
    batches: list[MicroBatch] = []
    rows: list[Sample] = []
    for sample in ordered:
        if rows and sample.length * (len(rows) + 1) > microbatch_tokens:
            batches.append(_padded(rows))
            rows = []
        rows.append(sample)
    if rows:
        batches.append(_padded(rows))
    return batches


def _padded(rows: Sequence[Sample]) -> MicroBatch:
    B, T = len(rows), max(sample.length for sample in rows)
    token_ids = np.zeros((B, T), np.int64)
    is_token, loss_mask = np.zeros((B, T), np.bool_), np.zeros((B, T), np.bool_)
    logprobs, advantages = np.zeros((B, T), np.float32), np.zeros((B, T), np.float32)
    temperatures = np.ones((B, T), np.float32)
    for b, sample in enumerate(rows):
        upto = sample.length
        token_ids[b, :upto], is_token[b, :upto] = sample.token_ids, True
        loss_mask[b, :upto] = sample.loss_mask
        logprobs[b, :upto], advantages[b, :upto] = sample.behaviour_logprobs, sample.advantages
        temperatures[b, :upto] = sample.temperatures
    return MicroBatch(
        rows=tuple(rows),
        token_ids=torch.from_numpy(token_ids),
        is_token=torch.from_numpy(is_token),
        loss_mask=torch.from_numpy(loss_mask),
        behaviour_logprobs=torch.from_numpy(logprobs),
        advantages=torch.from_numpy(advantages),
        temperatures=torch.from_numpy(temperatures),
    )
