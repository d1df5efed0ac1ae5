"""What a set of episodes says about a policy.

An episode without a valid outcome reward says nothing about success: it is left out there and counted apart (cases E1
and E15). Episodes of one task are not independent, so intervals resample tasks, not episodes.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from headrace.platform.records.episode import Episode
from headrace.platform.records.status import FaultOwner, RewardKind
from headrace.platform.records.tables import RewardRow

_RESAMPLES = 1000
_SUCCESS_AT = 1.0


class Interval(msgspec.Struct, frozen=True):
    """A mean with its 95 % percentile bootstrap interval. It has no width where all tasks agree."""

    mean: float
    low: float
    high: float


class Percentiles(msgspec.Struct, frozen=True):
    """P50 and P99 of durations, in seconds."""

    p50_s: float
    p99_s: float


class EvaluationSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The figures. What was not measured is None, never 0.

    `success` is the share of scored episodes that succeeded; `pass_at_1` is the same with every task weighing alike,
    however often it was played. `errors` counts episodes by fault owner, `statuses` by status.
    """

    episodes: int
    scored: int
    unscored: int
    success: Interval | None
    pass_at_1: float | None
    episode_s: Percentiles | None
    tool_s: Percentiles | None
    errors: dict[str, int]
    statuses: dict[str, int]


def summarize(episodes: Sequence[Episode], rewards: Mapping[str, Sequence[RewardRow]], seed: int) -> EvaluationSummary:
    """The summary of `episodes`; `rewards` by episode id as `RewardTable.by_episode` gives them.

    Args:
        seed: decides the resampling of the bootstrap and nothing else.
    """
    by_task: dict[str, list[float]] = defaultdict(list)
    for episode in episodes:
        outcome = outcome_of(episode, rewards.get(episode.episode_id, ()))
        if outcome is not None:
            by_task[episode.task.task_id].append(float(outcome >= _SUCCESS_AT))
    scored = sum(len(values) for values in by_task.values())
    tasks = list(by_task.values())
    return EvaluationSummary(
        episodes=len(episodes),
        scored=scored,
        unscored=len(episodes) - scored,
        success=bootstrap(tasks, seed) if tasks else None,
        pass_at_1=float(np.mean([np.mean(values) for values in tasks])) if tasks else None,
        episode_s=_percentiles([episode.duration_s for episode in episodes]),
        tool_s=_percentiles(
            [call.end_s - call.start_s for e in episodes for turn in e.turns for call in turn.tool_calls]
        ),
        errors=_counted([e.fault_owner for e in episodes if e.fault_owner is not FaultOwner.NONE]),
        statuses=_counted([episode.status for episode in episodes]),
    )


def outcome_of(episode: Episode, rows: Sequence[RewardRow]) -> float | None:
    """The sum of the episode's outcome rewards, or None where it has none or one of them is not valid."""
    values = [row.value for row in rows if row.kind is RewardKind.OUTCOME]
    if not values or episode.status.is_error:
        return None
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def bootstrap(clusters: Sequence[Sequence[float]], seed: int) -> Interval:
    """The mean over all values, and its percentile interval when whole clusters are drawn with replacement.

    Efron and Tibshirani, An Introduction to the Bootstrap, 1993, section 13.3.

    Raises:
        ValueError: for no clusters, or an empty one.
    """
    if not clusters or not all(clusters):
        raise ValueError("a bootstrap needs at least one value in every cluster")
    sums = np.array([sum(values) for values in clusters])
    sizes = np.array([len(values) for values in clusters])
    random = np.random.default_rng(seed)
    means = np.empty(_RESAMPLES)
    for resample in range(_RESAMPLES):
        drawn = random.integers(0, len(sums), len(sums))
        means[resample] = sums[drawn].sum() / sizes[drawn].sum()
    low, high = np.percentile(means, [2.5, 97.5])
    return Interval(float(sums.sum() / sizes.sum()), float(low), float(high))


def _percentiles(seconds: Sequence[float]) -> Percentiles | None:
    if not seconds:
        return None
    p50, p99 = np.percentile(seconds, [50, 99])
    return Percentiles(float(p50), float(p99))


def _counted(codes: Sequence[str]) -> dict[str, int]:
    return {str(code): count for code, count in sorted(Counter(codes).items())}
