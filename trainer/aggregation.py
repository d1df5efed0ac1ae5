"""Per-token terms of a loss to one number, such that microbatches add up to the step's mean exactly (case V6).

Every denominator is that of the whole optimizer step, so a microbatch returns its share and knows nothing of the
others. A sequence is one sample: one context, never cut by microbatches. Three ways, over terms x of tokens t of S
sequences s with n_s loss tokens each:

- token: sum(x) / sum(n). Every token counts alike; DAPO (Yu et al. 2025, arXiv:2503.14476, equation 8).
- sequence: sum over s of (sum over t in s of x) / n_s, divided by S. Every sequence counts alike, so a token of a long
  one counts less; GRPO (Shao et al. 2024, arXiv:2402.03300, equation 3).
- fixed: sum(x) / (S * length). Dr. GRPO (Liu et al. 2025, arXiv:2503.20783).

Owns also the columns that some losses need beside `LossTokens`. Dimensions: N loss tokens of a microbatch, B its rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headrace.trainer.batch import LossTokens
from headrace.trainer.samples import Sample

Aggregation = Literal["token", "sequence", "fixed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LossColumns(LossTokens):
    """Loss tokens with what options of a loss need besides.

    `step_sequences` counts the samples of the whole optimizer step that have a loss token. `reference_logprobs` and
    `proximal_logprobs` f32[N], without gradient, are those of the frozen reference and of the weights at the start of
    the batch; without the latter the present weights are those. `entropy` f32[N], with gradient, is that of the whole
    distribution, at the temperature of sampling, in nats.
    """

    step_sequences: int = 0
    reference_logprobs: Tensor | None = None
    proximal_logprobs: Tensor | None = None
    entropy: Tensor | None = None


def step_sequences(samples: Sequence[Sample]) -> int:
    """Samples of an optimizer step that have a loss token: the denominator of means over sequences."""
    return sum(sample.loss_tokens > 0 for sample in samples)


def with_columns(
    tokens: LossTokens,
    *,
    step_sequences: int = 0,
    reference_logprobs: Tensor | None = None,
    proximal_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
) -> LossColumns:
    """The same tokens with more columns; see `LossColumns`."""
    return LossColumns(
        rows=tokens.rows,
        row=tokens.row,
        column=tokens.column,
        behaviour_logprobs=tokens.behaviour_logprobs,
        advantages=tokens.advantages,
        step_tokens=tokens.step_tokens,
        step_sequences=step_sequences,
        reference_logprobs=reference_logprobs,
        proximal_logprobs=proximal_logprobs,
        entropy=entropy,
    )


def columns_of(batch: LossTokens) -> LossColumns:
    """`batch` itself.

    Raises:
        ValueError: when the backend gave plain loss tokens: the recipe's loss wants more.
    """
    if not isinstance(batch, LossColumns):
        raise ValueError("this loss needs columns that the learner's backend does not give (LossColumns)")
    return batch


def present(column: Tensor | None, what: str) -> Tensor:
    """`column` itself. Raises ValueError where the backend did not give it."""
    if column is None:
        raise ValueError(f"this loss needs {what}, which the learner's backend does not give")
    return column


def aggregate(values: Tensor, batch: LossTokens, how: Aggregation, fixed_length: int) -> Tensor:
    """This microbatch's share of the step's mean, a scalar.

    Args:
        values: f32[N], one term per loss token.
        batch: the same tokens.
        how: see the module.
        fixed_length: tokens that a sequence counts for when `how` is "fixed".

    Raises:
        ValueError: when the step's sequences are needed and not given.
    """
    if how == "token":
        return values.sum() / batch.step_tokens
    sequences = columns_of(batch).step_sequences
    if sequences < 1:
        raise ValueError(f"aggregation={how} needs the number of sequences of the step, which the backend did not give")
    if how == "fixed":
        return values.sum() / (sequences * fixed_length)
    return (values / token_counts(batch.row)[batch.row]).sum() / sequences


def token_counts(row: Tensor) -> Tensor:
    """Loss tokens f32[B] of each row; at least 1, so that it can divide. `row` is i64[N]."""
    return torch.bincount(row).clamp(min=1).float()


def per_row(values: Tensor, row: Tensor) -> Tensor:
    """Sums f32[B] of values f32[N] over each row, with gradient."""
    B = int(row.max()) + 1 if row.numel() else 0
    return torch.zeros(B, dtype=values.dtype, device=values.device).index_add(0, row, values)


def from_here_on(values: Tensor, row: Tensor) -> Tensor:
    """For each token the sum f32[N] of values f32[N] over itself and the later loss tokens of its row.

    Args:
        values: in the order of tokens.
        row: i64[N], ascending.
    """
    exact_N = values.double()
    upto_N = exact_N.cumsum(0)
    through_B = per_row(exact_N, row).cumsum(0)
    return (through_B[row] - upto_N + exact_N).to(values.dtype)
