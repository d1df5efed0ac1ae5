"""Figures of an optimizer step, over all its loss tokens, for each episode, by lag and by length.

A backend may return these from `step`, as the mapping that `LearnerBackend` promises with more besides; the learner
then writes complete receipts, notices a replica that has other weights than it says, and warns before importance
weights explode. The names of the step's figures are in `StepStatistics`.
"""

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

from headrace.trainer.batch import LossOutput, LossTokens
from headrace.trainer.corrections import MAX_LOG_RATIO
from headrace.trainer.gap import Gap
from headrace.trainer.off_policy import OffPolicy, SequenceSums, joined, sequence_sums

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class EpisodeStatistics:
    """Over the loss tokens of one episode."""

    loss_tokens: int
    ratio_mean: float
    clip_share: float


class StepStatistics(dict[str, float]):
    """The step's figures by name: loss, ratio_mean, clip_share, kl, entropy (where it was asked for), loss_tokens,
    grad_norm, lr. `gaps` have lag 0 each; the learner knows the lag of a version. `off_policy` is over all tokens,
    `by_lag` and `by_length` over those of each bucket."""

    def __init__(
        self,
        figures: dict[str, float],
        episodes: dict[str, EpisodeStatistics],
        gaps: tuple[Gap, ...] = (),
        *,
        off_policy: OffPolicy | None = None,
        by_lag: dict[int, OffPolicy] | None = None,
        by_length: dict[int, OffPolicy] | None = None,
    ) -> None:
        super().__init__(figures)
        self.episodes = episodes
        self.gaps = gaps
        self.off_policy = off_policy
        self.by_lag = by_lag or {}
        self.by_length = by_length or {}


@dataclass(slots=True)
class _GapSums:
    tokens: int = 0
    total: float = 0.0
    signed: float = 0.0
    largest: float = 0.0


@dataclass(slots=True)
class StatisticsBuilder:
    """Adds up microbatches; `merge` adds what another rank has added up."""

    loss: float = 0.0
    figures: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    sequences: list[SequenceSums] = field(default_factory=list)
    gaps: dict[tuple[int, str], _GapSums] = field(default_factory=dict)

    def add(self, output: LossOutput, tokens: LossTokens, logprobs: Tensor) -> None:
        """Take in one microbatch; logprobs f32[N] are the learner's, before the step."""
        difference = (logprobs.detach() - tokens.behaviour_logprobs).double().cpu().numpy()
        self._add_gaps(tokens, difference)
        self.loss += float(output.loss.detach())
        for name, sums in output.sums.items():
            self.figures[name] += float(sums)
        self.sequences.append(
            sequence_sums(
                tokens.rows,
                tokens.row.cpu().numpy(),
                log_ratio=difference.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO),
                ratio=output.ratio.double().cpu().numpy(),
                clipped=output.clipped.double().cpu().numpy(),
                kl=output.kl.double().cpu().numpy(),
            )
        )

    def merge(self, other: "StatisticsBuilder") -> None:
        """Take in what `other` has seen: other microbatches of the same step."""
        self.loss += other.loss
        for name, sums in other.figures.items():
            self.figures[name] += sums
        self.sequences += other.sequences
        for key, gap in other.gaps.items():
            mine = self.gaps.setdefault(key, _GapSums())
            mine.tokens += gap.tokens
            mine.total += gap.total
            mine.signed += gap.signed
            mine.largest = max(mine.largest, gap.largest)

    def _add_gaps(self, tokens: LossTokens, difference: F64) -> None:
        """difference f64[N], by who sampled the tokens: one search for all of them."""
        sources = [(b, source) for b, row in enumerate(tokens.rows) for source in row.sources]
        if not sources:
            return
        width = 1 + max(row.length for row in tokens.rows)
        starts = np.array([b * width + source.start for b, source in sources])
        ends = np.array([b * width + source.end for b, source in sources])
        place = (tokens.row * width + tokens.column).cpu().numpy()
        which = np.searchsorted(starts, place, side="right") - 1
        known = (which >= 0) & (place < ends[which])
        which, difference = which[known], difference[known]
        count = np.bincount(which, minlength=len(sources))
        total = np.bincount(which, np.abs(difference), len(sources))
        signed = np.bincount(which, difference, len(sources))
        largest = np.zeros(len(sources))
        np.maximum.at(largest, which, np.abs(difference))
        for index in np.flatnonzero(count):
            source = sources[index][1]
            sums = self.gaps.setdefault((source.version, source.replica), _GapSums())
            sums.tokens += int(count[index])
            sums.total += float(total[index])
            sums.signed += float(signed[index])
            sums.largest = max(sums.largest, float(largest[index]))

    def build(self, grad_norm: float, lr: float) -> StepStatistics:
        """The finished figures; at least one microbatch was added."""
        sums = joined(self.sequences)
        whole = sums.all()
        figures = {
            "loss": self.loss,
            "ratio_mean": whole.ratio_mean,
            "clip_share": whole.clip_share,
            "kl": whole.kl,
            "loss_tokens": float(whole.tokens),
            "grad_norm": grad_norm,
            "lr": lr,
            **{name: total / whole.tokens for name, total in self.figures.items()},
        }
        return StepStatistics(
            figures,
            _by_episode(sums),
            tuple(self._built_gaps()),
            off_policy=whole,
            by_lag=sums.by_lag(),
            by_length=sums.by_length(),
        )

    def _built_gaps(self) -> list[Gap]:
        return [
            Gap(
                version=version,
                replica=replica,
                lag=0,
                tokens=sums.tokens,
                mean=sums.total / sums.tokens,
                largest=sums.largest,
                signed=sums.signed / sums.tokens,
            )
            for (version, replica), sums in sorted(self.gaps.items())
        ]


def _by_episode(sums: SequenceSums) -> dict[str, EpisodeStatistics]:
    """An episode may have several sequences."""
    places: dict[str, list[int]] = defaultdict(list)
    for index, episode in enumerate(sums.episode):
        places[episode].append(index)
    found = {}
    for episode, own in places.items():
        tokens = int(sums.tokens[own].sum())
        found[episode] = EpisodeStatistics(
            tokens, float(sums.ratio[own].sum()) / tokens, float(sums.clipped[own].sum()) / tokens
        )
    return found
