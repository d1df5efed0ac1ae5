"""What each off-policy correction would make of one batch, at the same weights: gradients and weights side by side.

One forward pass, and for every correction the gradient of its loss. All have the run's clips, ratio and aggregation;
the divergence from a reference, the entropy bonus and the losses of a critic and of the environment's tokens are left
out, for no correction touches them.
`none` neither clips nor truncates: each token has its importance weight, whatever it is.

The *effective weight* of a token is what its A * grad log pi is multiplied with: the derivative of the loss by its
logprob, divided by that of an on-policy loss. It is 0 for a clipped or masked token, and undefined, so not counted,
where A is 0. That of a sequence is the mean over its tokens. Effective sample size: (sum w)^2 / sum w^2 (Kish 1965), as
a share of what is counted.

Owns the computation; changes neither weights nor optimizer. Dimensions: N loss tokens of a microbatch, S sequences
(samples with a loss token), P trained parameters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.platform.config.algorithm import AlgorithmOptions, CorrectionConfig, KlConfig
from headrace.platform.config.learner import LearnerConfig
from headrace.trainer.aggregation import step_sequences, with_columns
from headrace.trainer.algorithms.surrogate import PolicyLoss
from headrace.trainer.batch import LossTokens, MicroBatch, pack, step_tokens
from headrace.trainer.devices import on_device
from headrace.trainer.forward import TokenLogprobs
from headrace.trainer.packing import PackedBatch, pack_tokens
from headrace.trainer.samples import Sample

F64 = npt.NDArray[np.float64]
NONE, CLIP, TOKEN, SEQUENCE, KEEP, OWN = "none", "clip", "decoupled token", "decoupled sequence", "mask", "own"
KEPT = (0.5, 2.0)
"""Bounds of `mask` where the recipe has none."""
QUARTILES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Over `tokens` of `sequences`: their part of the loss, the share of clipped tokens, the k3 divergence of learner
    from behaviour in nats, the largest effective weight of a token, and effective sample sizes of tokens and of
    sequences as shares (None where every advantage is 0)."""

    tokens: int
    sequences: int
    loss: float
    clip_share: float
    kl: float
    largest_weight: float
    token_share: float | None
    sequence_share: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """One correction on the batch.

    `grad_norm` is before clipping; cosines are those of its gradient with the uncorrected one and with the run's own,
    None where one of both is 0. `by_lag` is keyed by learner batches (P14), `by_length` by the most tokens that a
    context of the quartile has. `is_own`: it is the one that the recipe names.
    """

    name: str
    is_own: bool
    grad_norm: float
    cosine_uncorrected: float | None
    cosine_own: float | None
    all: Bucket
    by_lag: Mapping[int, Bucket]
    by_length: Mapping[int, Bucket]


@dataclass(slots=True)
class _Sums:
    """Of one correction: sums over the loss tokens of each sequence, f64[S] once joined, and its gradient f32[P]."""

    loss: list[F64]
    clipped: list[F64]
    kl: list[F64]
    weight: list[F64]
    squared: list[F64]
    counted: list[F64]
    largest: list[F64]
    gradient: Tensor


def corrections(options: AlgorithmOptions) -> dict[str, AlgorithmOptions]:
    """The recipe's options under each correction, by name. `own` is there where the recipe's is none of them."""
    own = options.correction
    bare = options.model_copy(update={"kl": KlConfig(), "entropy": 0.0})
    unclipped = {"clip_low": 1.0, "clip_high": float("inf")}
    kinds = {
        CLIP: CorrectionConfig(kind="clip", cap=own.cap),
        TOKEN: CorrectionConfig(kind="decoupled", weights="token", cap=own.cap),
        SEQUENCE: CorrectionConfig(kind="decoupled", weights="sequence", cap=own.cap),
        KEEP: CorrectionConfig(kind="clip", keep=own.keep or KEPT, cap=own.cap),
    }
    found = {NONE: bare.model_copy(update={**unclipped, "correction": CorrectionConfig(cap=own.cap)})}
    found |= {name: bare.model_copy(update={"correction": kind}) for name, kind in kinds.items()}
    if own_name(options) == OWN:
        found[OWN] = bare
    return found


def own_name(options: AlgorithmOptions) -> str:
    """Which correction the recipe names: `own` for a combination that is none of the others."""
    own = options.correction
    if own.keep is not None:
        return KEEP if own.kind == "clip" else OWN
    if own.kind == "clip":
        return CLIP
    return TOKEN if own.weights == "token" else SEQUENCE


def sensitivity(
    model: Any, batch: Sequence[Sample], options: AlgorithmOptions, config: LearnerConfig
) -> list[Correction]:
    """Score `batch` under each correction at the present weights of `model`; the run's gradient is not taken.

    Raises:
        ValueError: no token of `batch` enters the loss.
    """
    samples = [sample for sample in batch if sample.loss_tokens]
    if not samples:
        raise ValueError("no token of this batch enters the loss")
    variants = {name: PolicyLoss(each) for name, each in corrections(options).items()}
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    size = sum(parameter.numel() for parameter in parameters)
    sums = {name: _Sums([], [], [], [], [], [], [], torch.zeros(size)) for name in variants}
    forward, order = TokenLogprobs(model, packed=True, dtype=getattr(torch, config.dtype)), list[Sample]()
    total, sequences = step_tokens(samples), step_sequences(samples)
    device = next(model.parameters()).device
    for micro in (on_device(each, device) for each in _microbatches(samples, forward, config)):
        logprobs_N = forward.of(micro, micro.loss_mask).logprobs
        tokens = with_columns(micro.loss_tokens(total), step_sequences=sequences)
        order += micro.rows
        for name, loss in variants.items():
            gradients = torch.autograd.grad(
                loss(logprobs_N, tokens).loss, parameters, retain_graph=True, allow_unused=True
            )
            sums[name].gradient += _flat(gradients, parameters)
            _add(sums[name], loss, logprobs_N.detach(), tokens)
    own = own_name(options)
    return [_concluded(name, one, sums[NONE].gradient, sums[own].gradient, own, order) for name, one in sums.items()]


def _microbatches(
    samples: Sequence[Sample], forward: TokenLogprobs, config: LearnerConfig
) -> Sequence[MicroBatch] | Sequence[PackedBatch]:
    if forward.why_padded:
        return pack(samples, config.microbatch_tokens)
    return pack_tokens(samples, config.microbatch_tokens, config.share_prefixes)


def _flat(gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> Tensor:
    """f32[P]; a parameter that the loss does not reach has 0."""
    pairs = zip(gradients, parameters, strict=True)
    return torch.cat([torch.zeros(p.numel()) if g is None else g.float().flatten().cpu() for g, p in pairs])


def _add(sums: _Sums, loss: PolicyLoss, logprobs: Tensor, tokens: LossTokens) -> None:
    """Take in a microbatch; logprobs f32[N] are without gradient. Every sample of it has a loss token."""
    S = len(tokens.rows)
    row = tokens.row.cpu().numpy()
    leaf_N = logprobs.clone().requires_grad_()
    output = loss(leaf_N, tokens)
    (slope_N,) = torch.autograd.grad(output.loss, leaf_N)
    plain_N = _on_policy_slope(loss, logprobs, tokens)
    weight_N = torch.where(plain_N != 0, slope_N / plain_N, 0.0).double().cpu().numpy()
    largest_S = np.zeros(S)
    np.maximum.at(largest_S, row, weight_N)

    def summed(values: F64) -> F64:
        return np.bincount(row, values, S).astype(np.float64)

    sums.loss.append(np.array([_loss_of(loss, logprobs, tokens, s) for s in range(S)]))
    sums.clipped.append(summed(output.clipped.double().cpu().numpy()))
    sums.kl.append(summed(output.kl.detach().double().cpu().numpy()))
    sums.weight.append(summed(weight_N))
    sums.squared.append(summed(weight_N**2))
    sums.counted.append(summed((plain_N != 0).double().cpu().numpy()))
    sums.largest.append(largest_S)


def _on_policy_slope(loss: PolicyLoss, logprobs: Tensor, tokens: LossTokens) -> Tensor:
    """f32[N]: the derivative of the loss by each logprob, had the present weights sampled the tokens."""
    leaf_N = logprobs.clone().requires_grad_()
    (slope_N,) = torch.autograd.grad(loss(leaf_N, _replaced(tokens, behaviour_logprobs=logprobs)).loss, leaf_N)
    return slope_N


@torch.no_grad()
def _loss_of(loss: PolicyLoss, logprobs: Tensor, tokens: LossTokens, sequence: int) -> float:
    """One sequence's part of the step's loss."""
    chosen = tokens.row == sequence
    part = {name: getattr(tokens, name)[chosen] for name in ("row", "column", "behaviour_logprobs", "advantages")}
    return float(loss(logprobs[chosen], _replaced(tokens, **part)).loss)


def _replaced(tokens: LossTokens, **changes: Any) -> LossTokens:
    return type(tokens)(**{each.name: getattr(tokens, each.name) for each in fields(tokens)} | changes)


def _concluded(
    name: str, sums: _Sums, uncorrected: Tensor, own: Tensor, own_name: str, order: Sequence[Sample]
) -> Correction:
    joined = {each.name: np.concatenate(getattr(sums, each.name)) for each in fields(sums) if each.name != "gradient"}
    joined["tokens"] = np.array([sample.loss_tokens for sample in order], np.float64)
    lags, lengths = np.array([sample.lag for sample in order]), np.array([sample.length for sample in order])
    edges = np.unique(np.quantile(lengths, np.arange(1, QUARTILES + 1) / QUARTILES, method="inverted_cdf"))
    quartile = edges[np.searchsorted(edges, lengths)]
    return Correction(
        name=name,
        is_own=name == own_name,
        grad_norm=float(sums.gradient.double().norm()),
        cosine_uncorrected=_cosine(sums.gradient, uncorrected),
        cosine_own=_cosine(sums.gradient, own),
        all=_bucket(joined, np.ones(len(order), np.bool_)),
        by_lag={int(lag): _bucket(joined, lags == lag) for lag in np.unique(lags)},
        by_length={int(edge): _bucket(joined, quartile == edge) for edge in np.unique(quartile)},
    )


def _bucket(joined: Mapping[str, F64], chosen: npt.NDArray[np.bool_]) -> Bucket:
    part = {name: values[chosen] for name, values in joined.items()}
    tokens = float(part["tokens"].sum())
    counts = part["counted"] > 0
    mean = part["weight"][counts] / part["counted"][counts]
    return Bucket(
        tokens=int(tokens),
        sequences=int(chosen.sum()),
        loss=float(part["loss"].sum()),
        clip_share=float(part["clipped"].sum()) / tokens,
        kl=float(part["kl"].sum()) / tokens,
        largest_weight=float(part["largest"].max()),
        token_share=_share(float(part["weight"].sum()), float(part["squared"].sum()), float(part["counted"].sum())),
        sequence_share=_share(float(mean.sum()), float((mean**2).sum()), float(counts.sum())),
    )


def _share(total: float, squared: float, count: float) -> float | None:
    """(sum w)^2 / sum w^2 as a share of `count`; 0 where every weight is 0, None where there is none."""
    if not count:
        return None
    return total**2 / squared / count if squared else 0.0


def _cosine(one: Tensor, other: Tensor) -> float | None:
    norms = float(one.double().norm()) * float(other.double().norm())
    return float(one.double() @ other.double()) / norms if norms else None
