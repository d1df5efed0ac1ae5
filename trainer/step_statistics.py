"""Figures of an optimizer step, over all its loss tokens and for each episode.

A backend may return these from `step`, as the mapping that `LearnerBackend` promises with `episodes` and `gaps`
besides; the learner then writes complete receipts, and notices a replica that has other weights than it says. The
names of the step's figures are the attributes' names below.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.trainer.batch import LossOutput, LossTokens
from headrace.trainer.gap import Gap

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class EpisodeStatistics:
    """Over the loss tokens of one episode."""

    loss_tokens: int
    ratio_mean: float
    clip_share: float


class StepStatistics(dict[str, float]):
    """The step's figures by name: loss, ratio_mean, clip_share, kl, loss_tokens, grad_norm, lr. `gaps` have lag 0 each;
    the learner knows the lag of a version."""

    def __init__(
        self, figures: dict[str, float], episodes: dict[str, EpisodeStatistics], gaps: tuple[Gap, ...] = ()
    ) -> None:
        super().__init__(figures)
        self.episodes = episodes
        self.gaps = gaps


@dataclass(slots=True)
class _Sums:
    tokens: int = 0
    ratio: float = 0.0
    clipped: float = 0.0


@dataclass(slots=True)
class _GapSums:
    tokens: int = 0
    total: float = 0.0
    signed: float = 0.0
    largest: float = 0.0


@dataclass(slots=True)
class StatisticsBuilder:
    """Adds up microbatches."""

    loss: float = 0.0
    kl: float = 0.0
    total: _Sums = field(default_factory=_Sums)
    episodes: dict[str, _Sums] = field(default_factory=dict)
    gaps: dict[tuple[int, str], _GapSums] = field(default_factory=dict)

    def add(self, output: LossOutput, tokens: LossTokens, logprobs: Tensor) -> None:
        """Take in one microbatch; logprobs f32[N] are the learner's, before the step."""
        self._add_gaps(tokens, (logprobs.detach() - tokens.behaviour_logprobs).double().cpu().numpy())
        self.loss += float(output.loss.detach())
        self.kl += float(output.kl.sum())
        B = len(tokens.rows)
        row = tokens.row.cpu()
        count = torch.bincount(row, minlength=B).tolist()
        ratio = torch.zeros(B, dtype=torch.float64).index_add_(0, row, output.ratio.double().cpu()).tolist()
        clipped = torch.zeros(B, dtype=torch.float64).index_add_(0, row, output.clipped.double().cpu()).tolist()
        for b, sample in enumerate(tokens.rows):
            for sums in (self.total, self.episodes.setdefault(sample.episode_id, _Sums())):
                sums.tokens += count[b]
                sums.ratio += ratio[b]
                sums.clipped += clipped[b]

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
        """The finished figures."""
        tokens = max(self.total.tokens, 1)
        figures = {
            "loss": self.loss,
            "ratio_mean": self.total.ratio / tokens,
            "clip_share": self.total.clipped / tokens,
            "kl": self.kl / tokens,
            "loss_tokens": float(self.total.tokens),
            "grad_norm": grad_norm,
            "lr": lr,
        }
        episodes = {
            name: EpisodeStatistics(sums.tokens, sums.ratio / sums.tokens, sums.clipped / sums.tokens)
            for name, sums in self.episodes.items()
            if sums.tokens
        }
        gaps = [
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
        return StepStatistics(figures, episodes, tuple(gaps))
