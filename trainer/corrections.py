"""What is done about tokens that other weights have sampled. Pure functions of logprobs.

Three distributions stand behind a token: behaviour mu (the engine that sampled it), proximal p (the learner's weights
at the start of the batch) and the learner's pi, which has the gradient. A log ratio is the logprob under the one minus
that under the other. What corrects tokens says nothing of the states that older weights led to: keep the lag small,
and look at off_policy.py.

Sources: the clipped surrogate is PPO's (Schulman et al. 2017, arXiv:1707.06347, equation 7) with two bounds (DAPO,
arXiv:2503.14476, section 3.1). The decoupled form is that of Hilton et al. 2021 (arXiv:2110.00641) as in AReaL (Fu et
al. 2025, arXiv:2505.24298, section 5.2). Weights are truncated from above only, as in IMPALA (Espeholt et al. 2018,
arXiv:1802.01561, section 4.1). Sequence ratios are geometric means (GSPO, Zheng et al. 2025, arXiv:2507.18071,
equation 7; with gradients token by token, equations 13 and 14).

Dimensions: N loss tokens of a microbatch, B its rows (one sequence each). `row` i64[N] says which token is whose.
"""

import torch
from torch import Tensor

from headrace.trainer.aggregation import per_row, token_counts

MAX_LOG_RATIO = 20.0
"""Keeps exp() finite in fp32; far outside every clip range."""


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


def product_log_ratio(log_ratios: Tensor, row: Tensor) -> Tensor:
    """The log ratio of each token's whole sequence f32[N], with the gradient of all its tokens."""
    return per_row(log_ratios, row).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)[row]


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
