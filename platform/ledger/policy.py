"""The ledger's decisions, as pure functions: lag, room, batch size, retries, and what becomes of a group.

No I/O and no clock. `MemoryLedger` calls these; the Lua scripts carry the same rules and the conformance suite and
the model test hold the two together.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from headrace.platform.records.delivery import LedgerLimits
from headrace.platform.records.status import DropReason

NO_VERSION = -1
"""Parent of the first version."""
EPOCH_ATTEMPTS = 1_000
"""Attempt numbers per epoch: a group number that is given out again after a loss never repeats an attempt."""
EPOCH_FENCES = 1_000_000
EPOCH_REVISIONS = 1_000_000_000_000
"""Fences and revisions of an epoch are above all of the one before (P8)."""
_SHORTEST, _LONGEST = -8, 40


class VersionNode(NamedTuple):
    """A committed version: its parent, and B of P14, the learner batches applied along its lineage."""

    parent: int
    batches: int


def path_lag(lineage: Mapping[int, VersionNode], parent: int, ahead: int, version: int, limit: int) -> int:
    """Lag of a token of `version` for weights that are `ahead` batches past `parent` (P14).

    For a version off the parent's lineage this is the path through the common ancestor. The walk stops as soon as
    the path is longer than `limit`, so its cost is bounded by the limit, not by the run.

    Returns:
        The lag in learner batches, or `limit + 1` for everything above the limit and for an unknown version.
    """
    if parent not in lineage or version not in lineage:
        return limit + 1
    upper, lower = parent, version
    total = lineage[parent].batches + ahead + lineage[version].batches
    while True:
        lag = total - lineage[upper].batches - lineage[lower].batches
        if lag > limit:
            return limit + 1
        if upper == lower:
            return lag
        # A child's number is above its parent's (P6): the larger of two different numbers is not the ancestor.
        if upper > lower:
            upper = lineage[upper].parent
        else:
            lower = lineage[lower].parent
        if upper not in lineage or lower not in lineage:
            return limit + 1


class LagView:
    """Lags as seen from weights `ahead` batches past `parent`; every path is walked once."""

    def __init__(self, lineage: Mapping[int, VersionNode], parent: int, ahead: int, limit: int) -> None:
        self._from = (lineage, parent, ahead)
        self._limit = limit
        self._lags: dict[int, int] = {}

    def of(self, version: int) -> int:
        """See `path_lag`."""
        if version not in self._lags:
            lineage, parent, ahead = self._from
            self._lags[version] = path_lag(lineage, parent, ahead, version, self._limit)
        return self._lags[version]

    def over(self, version: int) -> bool:
        """Whether it is over the limit."""
        return self.of(version) > self._limit

    def is_last_chance(self, version: int) -> bool:
        """Whether it is within the limit, and would not be one batch later."""
        return self.of(version) == self._limit

    def capped(self, version: int) -> int:
        """The lag, or the limit for what is over it and masked."""
        return min(self.of(version), self._limit)


def is_ancestor(lineage: Mapping[int, VersionNode], ancestor: int, version: int) -> bool:
    """Whether `ancestor` is `version` itself or lies on its path to the first version."""
    while version > ancestor and version in lineage:
        version = lineage[version].parent
    return version == ancestor and version in lineage


def capacity(limits: LedgerLimits, lag: int, groups_used: int) -> int:
    """How many groups may be admitted for a version of this lag (P20).

    (max_lag - lag + 1) batches can still train on it. `groups_used` counts open, ready and leased groups: a leased
    one fills a place in a batch that the head does not count yet. Never below what the next batch lacks.
    """
    batches = max(limits.max_lag - lag + 1, 1)
    return max(batches * limits.batch_groups - groups_used, 0)


def batch_target(ready: int, zero_variance_since_commit: int, batch_groups: int, oversample_max: float) -> int:
    """How many groups the learner asks for.

    A full batch; but once `oversample_max` batches' worth of groups had no variance since the last commit, whatever
    is ready, and at least one: a policy that has nearly converged still steps.
    """
    if zero_variance_since_commit < oversample_max * batch_groups:
        return batch_groups
    return max(1, min(ready, batch_groups))


def closing_drop(limits: LedgerLimits, live: int, lowest: float, highest: float) -> DropReason | None:
    """Why a group whose slots have all ended is dropped, or None when it becomes ready.

    Args:
        limits: the run's limits.
        live: how many of its episodes may be trained.
        lowest: smallest of their scores.
        highest: largest of their scores.
    """
    if live < limits.min_group:
        return DropReason.TOO_FEW
    if limits.drop_zero_variance and lowest == highest:
        return DropReason.ZERO_VARIANCE
    return None


def may_close_early(limits: LedgerLimits, size: int, running: int, scores: Sequence[float]) -> bool:
    """Whether an open group may do without its `running` members (P18); `scores` are those of the others that are
    done. A group without variance waits: the members that are missing may bring it."""
    missing_few = running <= limits.early_missing and len(scores) >= size - limits.early_missing
    if not scores or not missing_few:
        return False
    return closing_drop(limits, len(scores), min(scores), max(scores)) is None


def is_protected(limits: LedgerLimits, restarts: int) -> bool:
    """Whether a group is at its last restart, so that the learner waits for it (P16)."""
    return 0 < limits.lag_restarts <= restarts


def may_retry(limits: LedgerLimits, attempt: int, base: int) -> bool:
    """Whether a slot whose first attempt was `base` has another one after `attempt`."""
    return attempt + 1 - base < limits.max_attempts


def base_of(attempt: int) -> int:
    """The first attempt number of the epoch that `attempt` belongs to."""
    return attempt - attempt % EPOCH_ATTEMPTS


def length_bucket(seconds: float) -> int:
    """floor(2 log2(seconds)), between -8 and 40: the bucket of `LedgerStats.lengths` (P16)."""
    if seconds <= 0:
        return _SHORTEST
    fraction, exponent = math.frexp(seconds)
    return min(max(2 * (exponent - 1) + (fraction * fraction >= 0.5), _SHORTEST), _LONGEST)
