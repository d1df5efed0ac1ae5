"""Loss tokens for tests of losses: a few sequences, with what options need besides."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.platform.records import f32, i32
from headrace.trainer.aggregation import LossColumns
from headrace.trainer.samples import Sample


def columns(
    behaviour: Sequence[Sequence[float]],
    advantages: Sequence[Sequence[float]],
    *,
    reference: Sequence[Sequence[float]] | None = None,
    proximal: Sequence[Sequence[float]] | None = None,
    entropy: Tensor | None = None,
    step_tokens: int | None = None,
    step_sequences: int | None = None,
) -> LossColumns:
    """One row per sequence; they are the whole step unless its totals are given."""
    lengths = torch.tensor([len(one) for one in behaviour])
    return LossColumns(
        rows=(),
        row=torch.repeat_interleave(torch.arange(len(behaviour)), lengths),
        column=torch.cat([torch.arange(1, int(n) + 1) for n in lengths]),
        behaviour_logprobs=flat(behaviour),
        advantages=flat(advantages),
        step_tokens=int(lengths.sum()) if step_tokens is None else step_tokens,
        step_sequences=len(behaviour) if step_sequences is None else step_sequences,
        reference_logprobs=None if reference is None else flat(reference),
        proximal_logprobs=None if proximal is None else flat(proximal),
        entropy=entropy,
    )


def samples_of(lengths: Sequence[int], lags: Sequence[int]) -> list[Sample]:
    """Samples of nothing but loss tokens, an episode each."""
    return [
        Sample(
            episode_id=f"run.t0.{n}.0",
            agent_id="",
            segment=0,
            lag=lag,
            token_ids=i32([1] * length),
            action_mask=np.ones(length, np.uint8),
            loss_mask=np.ones(length, np.uint8),
            behaviour_logprobs=f32([0.0] * length),
            advantages=f32([0.0] * length),
            temperatures=f32([1.0] * length),
        )
        for n, (length, lag) in enumerate(zip(lengths, lags, strict=True))
    ]


def flat(rows: Sequence[Sequence[float]]) -> Tensor:
    """f32[N], row by row."""
    return torch.tensor([value for row in rows for value in row])
