"""Figures of an optimizer step, over all its loss tokens and for each episode.

A backend may return these from `step`, as the mapping that `LearnerBackend` promises with `episodes` besides; the
learner then writes complete receipts. The names of the step's figures are the attributes' names below.
"""

from dataclasses import dataclass, field

import torch

from headrace.trainer.batch import LossOutput, LossTokens


@dataclass(frozen=True, slots=True)
class EpisodeStatistics:
    """Over the loss tokens of one episode."""

    loss_tokens: int
    ratio_mean: float
    clip_share: float


class StepStatistics(dict[str, float]):
    """The step's figures by name: loss, ratio_mean, clip_share, kl, loss_tokens, grad_norm, lr."""

    def __init__(self, figures: dict[str, float], episodes: dict[str, EpisodeStatistics]) -> None:
        super().__init__(figures)
        self.episodes = episodes


@dataclass(slots=True)
class _Sums:
    tokens: int = 0
    ratio: float = 0.0
    clipped: float = 0.0


@dataclass(slots=True)
class StatisticsBuilder:
    """Adds up microbatches."""

    loss: float = 0.0
    kl: float = 0.0
    total: _Sums = field(default_factory=_Sums)
    episodes: dict[str, _Sums] = field(default_factory=dict)

    def add(self, output: LossOutput, tokens: LossTokens) -> None:
        """Take in one microbatch."""
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
        return StepStatistics(figures, episodes)
