"""The ledger's decisions, as pure functions: lag, room, batch size, and what becomes of a group that has ended.

No I/O and no clock. `MemoryLedger` calls these; the Lua scripts carry the same rules and the conformance suite and
the model test hold the two together.
"""

from collections.abc import Mapping
from typing import NamedTuple

from headrace.platform.records.delivery import LedgerLimits
from headrace.platform.records.status import DropReason

NO_VERSION = -1
"""Parent of the first version."""


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
        if NO_VERSION in (upper, lower):
            return limit + 1


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
