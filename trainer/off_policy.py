"""How far the tokens of a batch are from the weights that train on them: over all, by lag, and by length.

What corrects single tokens (corrections.py) says nothing of the states that older weights led to, so these figures are
the place to look before a step goes wrong: `warning` speaks up before importance weights explode. All of them are
unclipped and without gradient. Effective sample size: Kish 1965, (sum w)^2 / sum w^2, here as a share of the number of
weights. A sequence is one sample; its weight is the product over its tokens.

Owns the sums per sequence that everything else is made of: microbatches never cut a sequence, so nothing finer is kept.
Dimensions: N loss tokens of a microbatch, S sequences of a step that have any.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.trainer.samples import Sample

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

LEAST_TOKEN_SHARE = 0.5
"""Below this effective share of the tokens a few of them decide the step."""
LEAST_SEQUENCE_SHARE = 0.1
"""The same for whole sequences, whose ratios are products and spread by themselves."""
LARGEST_LOG_RATIO = 5.0
"""A token that is 150 times likelier, or less likely, than when it was sampled, in nats."""
SHORTEST_BUCKET = 64
"""Loss tokens; the next buckets of length end at 4, 16, 64 ... times as many."""


class OffPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Learner against behaviour over `tokens` of `sequences`: means of ratio, of the k3 estimate of the divergence in
    nats, and of being clipped; effective sample sizes of tokens and of sequences, as shares; and the largest absolute
    log ratio of a token, in nats."""

    tokens: int
    sequences: int
    ratio_mean: float
    kl: float
    clip_share: float
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


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceSums:
    """Over the loss tokens of each sequence: all f64[S], `lag` and `tokens` i64[S]; `episode` names them. `weight` and
    `weight_squared` are sums over tokens, `log_weight` the log of the product."""

    episode: tuple[str, ...]
    lag: I64
    tokens: I64
    ratio: F64
    clipped: F64
    kl: F64
    log_weight: F64
    weight: F64
    weight_squared: F64
    largest: F64

    def __len__(self) -> int:
        return len(self.episode)

    def over(self, chosen: npt.NDArray[np.bool_]) -> OffPolicy:
        """The figures over the sequences where `chosen` bool[S] is true; there is at least one."""
        tokens = int(self.tokens[chosen].sum())
        log_weight = self.log_weight[chosen]
        weight = np.exp(log_weight - log_weight.max())  # the share does not change with the scale
        squared = float(self.weight_squared[chosen].sum())
        return OffPolicy(
            tokens=tokens,
            sequences=len(log_weight),
            ratio_mean=float(self.ratio[chosen].sum()) / tokens,
            kl=float(self.kl[chosen].sum()) / tokens,
            clip_share=float(self.clipped[chosen].sum()) / tokens,
            token_share=float(self.weight[chosen].sum()) ** 2 / squared / tokens,
            sequence_share=float(weight.sum() ** 2 / (weight**2).sum()) / len(weight),
            largest=float(self.largest[chosen].max()),
        )

    def all(self) -> OffPolicy:
        """The figures over all sequences."""
        return self.over(np.ones(len(self), np.bool_))

    def by_lag(self) -> dict[int, OffPolicy]:
        """The figures by lag, in learner batches (P14)."""
        return {int(lag): self.over(self.lag == lag) for lag in np.unique(self.lag)}

    def by_length(self) -> dict[int, OffPolicy]:
        """The figures by length, keyed by the most loss tokens that a sequence of the bucket may have."""
        steps = np.ceil(np.log2(np.maximum(self.tokens / SHORTEST_BUCKET, 1.0)) / 2).astype(np.int64)
        return {int(SHORTEST_BUCKET * 4**step): self.over(steps == step) for step in np.unique(steps)}


def sequence_sums(
    samples: Sequence[Sample], row: I64, *, log_ratio: F64, ratio: F64, clipped: F64, kl: F64
) -> SequenceSums:
    """The sums of one microbatch. `row` i64[N] is an index into `samples`; the rest is f64[N]; `log_ratio` is that of
    learner to behaviour, within bounds that exp() survives squared."""
    B = len(samples)
    count = np.bincount(row, minlength=B)
    has = np.flatnonzero(count)
    weight = np.exp(log_ratio)
    largest = np.zeros(B)
    np.maximum.at(largest, row, np.abs(log_ratio))

    def summed(values: F64) -> F64:
        return np.bincount(row, values, B)[has].astype(np.float64)

    return SequenceSums(
        episode=tuple(samples[b].episode_id for b in has),
        lag=np.array([samples[b].lag for b in has], np.int64),
        tokens=count[has],
        ratio=summed(ratio),
        clipped=summed(clipped),
        kl=summed(kl),
        log_weight=summed(log_ratio),
        weight=summed(weight),
        weight_squared=summed(weight**2),
        largest=largest[has],
    )


def joined(parts: Sequence[SequenceSums]) -> SequenceSums:
    """All sequences of several microbatches; at least one."""

    def together(name: str) -> npt.NDArray[np.float64]:
        return np.concatenate([getattr(part, name) for part in parts])

    return SequenceSums(
        episode=tuple(name for part in parts for name in part.episode),
        lag=np.concatenate([part.lag for part in parts]),
        tokens=np.concatenate([part.tokens for part in parts]),
        ratio=together("ratio"),
        clipped=together("clipped"),
        kl=together("kl"),
        log_weight=together("log_weight"),
        weight=together("weight"),
        weight_squared=together("weight_squared"),
        largest=together("largest"),
    )
