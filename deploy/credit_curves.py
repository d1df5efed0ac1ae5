"""What a run had learned by how many environment steps: learning curves on the axis that costs.

An environment step is a policy turn that was executed in a training episode, trained or dropped alike. Turns that a
continuation inherits were executed by the episode that it branches off; that its world did them again is counted
apart, for a world with snapshots would not. Needs runs in process: there, versions and episodes alternate, so that
what had been executed before a version are the episodes of older ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from headrace.platform.observability.metrics import read_metrics
from headrace.platform.observability.names import Metric
from headrace.platform.records.status import Purpose
from headrace.platform.store.episodes import EpisodeStore
from headrace.platform.store.run_root import RunRoot


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """An evaluated version: the environment steps executed before it, those done again beside, and its mean score."""

    version: int
    executed: int
    again: int
    score: float


def credit_curve(root: RunRoot) -> list[CurvePoint]:
    """The evaluations of a finished run in process, in the order of versions. Each version counts with its first."""
    executed: dict[int, int] = {}
    again: dict[int, int] = {}
    for episode in EpisodeStore(root.url).iterate():
        if episode.purpose is Purpose.TRAIN:
            number, inherited = episode.version.number, episode.inherited_turns
            repeated = sum(view.turn < inherited for view in episode.views)
            executed[number] = executed.get(number, 0) + len(episode.views) - repeated
            again[number] = again.get(number, 0) + repeated
    scores: dict[int, float] = {}
    for record in read_metrics(root.metrics):
        if Metric.EVAL_VERSION in record:
            scores.setdefault(int(record[Metric.EVAL_VERSION]), float(record[Metric.EVAL_SCORE]))
    return [
        CurvePoint(version, _before(executed, version), _before(again, version), score)
        for version, score in sorted(scores.items())
    ]


def score_at(curve: Sequence[CurvePoint], executed: float) -> float:
    """The mean score after so many environment steps, on the straight line between two evaluations; that of the last
    one where the run ended before."""
    for before, after in pairwise(curve):
        if before.executed <= executed < after.executed:
            share = (executed - before.executed) / (after.executed - before.executed)
            return before.score + share * (after.score - before.score)
    return curve[-1].score if executed >= curve[-1].executed else curve[0].score


def steps_to(curve: Sequence[CurvePoint], score: float) -> float | None:
    """Environment steps until the mean score reaches `score` for the first time; None where it never does."""
    if curve[0].score >= score:
        return float(curve[0].executed)
    for before, after in pairwise(curve):
        if after.score >= score:
            share = (score - before.score) / (after.score - before.score)
            return before.executed + share * (after.executed - before.executed)
    return None


def _before(counts: dict[int, int], version: int) -> int:
    return sum(count for number, count in counts.items() if number < version)
