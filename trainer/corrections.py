"""What is done about tokens that other weights have sampled. Pure functions of logprobs.

Three distributions stand behind a token: behaviour mu (the engine that sampled it), proximal p (the learner's weights
at the start of the batch) and the learner's pi, which has the gradient. A log ratio is the logprob under the one minus
that under the other. What corrects tokens says nothing of the states that older weights led to: keep the lag small,
and look at `weight_health`.

Sources: the clipped surrogate is PPO's (Schulman et al. 2017, arXiv:1707.06347, equation 7) with two bounds (DAPO,
arXiv:2503.14476, section 3.1). The decoupled form is that of Hilton et al. 2021 (arXiv:2110.00641) as in AReaL (Fu et
al. 2025, arXiv:2505.24298, section 5.2). Weights are truncated from above only, as in IMPALA (Espeholt et al. 2018,
arXiv:1802.01561, section 4.1). Sequence ratios are geometric means (GSPO, Zheng et al. 2025, arXiv:2507.18071,
equation 7; with gradients token by token, equations 13 and 14). Effective sample size: Kish 1965, (sum w)^2 / sum w^2.

Dimensions: N loss tokens of a microbatch, B its rows (one sequence each). `row` i64[N] says which token is whose.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.trainer.aggregation import per_row, token_counts

MAX_LOG_RATIO = 20.0
"""Keeps exp() finite in fp32; far outside every clip range."""
LEAST_TOKEN_SHARE = 0.5
"""Below this effective share of the tokens a few of them decide the step."""
LEAST_SEQUENCE_SHARE = 0.1
"""The same for whole sequences, whose ratios are products and spread by themselves."""
LARGEST_LOG_RATIO = 5.0
"""A token that is 150 times likelier, or less likely, than when it was sampled, in nats."""


def log_ratio(learner: Tensor, other: Tensor) -> Tensor:
    """log(pi / other) f32[N], within bounds that exp() survives."""
    return (learner - other).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """min(ratio * A, clip(ratio, 1 - low, 1 + high) * A) f32[N], and where it is clipped, bool[N].

    A clipped token has no gradient: the ratio is already further than it should go in the direction of A.
    """
    least, most = 1.0 - low, 1.0 + high
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(least, most) * advantages)
    with torch.no_grad():
        clipped = ((advantages > 0) & (ratio > most)) | ((advantages < 0) & (ratio < least))
    return surrogate, clipped


def sequence_log_ratio(log_ratios: Tensor, row: Tensor) -> Tensor:
    """The mean log ratio of each token's sequence f32[N], with the gradient of the token's own ratio.

    So the sum over a sequence of n tokens has the gradient of n times its geometric mean ratio, when their advantages
    are equal; when turns differ, each token's gradient has its own turn's advantage.
    """
    with torch.no_grad():
        mean_B = per_row(log_ratios, row) / token_counts(row)
    return mean_B[row] + (log_ratios - log_ratios.detach())


@torch.no_grad()
def token_weights(log_ratios: Tensor, cap: float) -> Tensor:
    """min(p / mu, cap) f32[N], without gradient.

    Args:
        log_ratios: log(p / mu) f32[N].
        cap: largest weight.
    """
    return log_ratios.exp().clamp(max=cap)


@torch.no_grad()
def sequence_weights(log_ratios: Tensor, row: Tensor, cap: float) -> Tensor:
    """min(product over the token's sequence of p / mu, cap) f32[N], without gradient."""
    return per_row(log_ratios, row).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=cap)[row]


@torch.no_grad()
def kept_sequences(log_ratios: Tensor, row: Tensor, low: float, high: float) -> Tensor:
    """Whether the token's sequence has a geometric mean ratio within [low, high], bool[N]."""
    mean_B = (per_row(log_ratios, row) / token_counts(row)).exp()
    return ((mean_B >= low) & (mean_B <= high))[row]


@torch.no_grad()
def effective_share(log_weights: Tensor) -> float:
    """Effective sample size of weights exp(log_weights) f32[n], as a share of n: 1 when all are equal, 1 / n when one
    outweighs all. 1 for none."""
    if log_weights.numel() == 0:
        return 1.0
    weights = (log_weights.double() - log_weights.double().max()).exp()  # the share does not change with the scale
    return float(weights.sum() ** 2 / (weights**2).sum() / weights.numel())


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightHealth:
    """Importance weights of a batch: effective sample size as a share, of tokens and of sequences (products over their
    tokens), and the largest absolute log ratio of a token, in nats."""

    tokens: int
    sequences: int
    token_share: float
    sequence_share: float
    largest: float

    @property
    def warning(self) -> str:
        """What is about to explode; empty when nothing is."""
        found = []
        if self.token_share < LEAST_TOKEN_SHARE:
            found.append(f"{self.tokens} tokens weigh as much as {self.token_share * self.tokens:.1f}")
        if self.sequence_share < LEAST_SEQUENCE_SHARE:
            found.append(f"{self.sequences} sequences weigh as much as {self.sequence_share * self.sequences:.1f}")
        if self.largest > LARGEST_LOG_RATIO:
            found.append(f"a token's log ratio is {self.largest:.1f} nats")
        return f"importance weights are about to explode: {'; '.join(found)}" if found else ""


@torch.no_grad()
def weight_health(log_ratios: Tensor, row: Tensor) -> WeightHealth:
    """Judge the log ratios f32[N] of learner to behaviour, unclipped, of the loss tokens of a batch."""
    rows, compact = torch.unique(row, return_inverse=True)
    return WeightHealth(
        tokens=log_ratios.numel(),
        sequences=rows.numel(),
        token_share=effective_share(log_ratios),
        sequence_share=effective_share(per_row(log_ratios.double(), compact)),
        largest=float(log_ratios.abs().max()) if log_ratios.numel() else 0.0,
    )
