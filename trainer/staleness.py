"""Lag of an episode's tokens for the weights about to receive the gradient (P14), and which of them are over the limit.

Pure: no clock, no ledger. The same walk through the lineage as the ledger's, so both judge alike; the learner judges
token by token, because only it opens the episodes. What follows from the verdict (P15) is the intake's business.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from headrace.platform.ledger.policy import VersionNode, path_lag
from headrace.platform.records.episode import Episode
from headrace.platform.records.tables import LossMaskReason, MaskedSpan


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainStart:
    """The weights at the start of a batch: `ahead` unpublished learner batches past the published version `parent`."""

    lineage: Mapping[int, VersionNode]
    parent: int
    ahead: int

    def lag(self, version: int, limit: int, otherwise: int) -> int:
        """Lag of a token of `version` in learner batches, `limit + 1` for whatever is above the limit (P14).

        Inner updates are no batches. `otherwise` stands for a version that this learner has never heard of.
        """
        if version not in self.lineage:
            return otherwise
        return path_lag(self.lineage, self.parent, self.ahead, version, limit)


@dataclass(frozen=True, slots=True)
class Staleness:
    """One episode at train start: the lag of its oldest token within the limit (over the limit when there is none),
    and the action tokens that are over it. `live` says whether any is within it."""

    lag: int
    over: tuple[MaskedSpan, ...]
    live: bool


def staleness(episode: Episode, pinned: int, lag_of: Callable[[int], int], limit: int) -> Staleness:
    """Judge every action token of an episode that it may be trained on for (P14, case Q5): not those that it inherits.

    Args:
        episode: one that passed the fidelity gate.
        pinned: the version that stands for an episode without any such token.
        lag_of: lag of a version's tokens.
        limit: largest lag that is trained on.
    """
    inherited = episode.inherited_turns
    spans = [(turn, span) for turn, one in enumerate(episode.turns) if turn >= inherited for span in one.version_spans]
    lags = [lag_of(span.version.number) for _, span in spans] or [lag_of(pinned)]
    within = [lag for lag in lags if lag <= limit]
    over = tuple(
        MaskedSpan(turn, span.start, span.end, LossMaskReason.LAG)
        for (turn, span), lag in zip(spans, lags, strict=False)
        if lag > limit
    )
    return Staleness(max(within or lags), over, bool(within))
