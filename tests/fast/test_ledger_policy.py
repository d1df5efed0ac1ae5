"""The ledger's decisions, on numbers worked by hand."""

import pytest

from headrace.platform.ledger.policy import (
    NO_VERSION,
    LagView,
    VersionNode,
    base_of,
    batch_target,
    capacity,
    closing_drop,
    is_ancestor,
    is_protected,
    length_bucket,
    may_close_early,
    may_retry,
    path_lag,
)
from headrace.platform.records.delivery import LedgerLimits
from headrace.platform.records.status import DropReason

# 0 ── 1 ── 2 ── 3 ── 4 ── … ── 10, one batch each; rolled back to 3, then 11 with three batches.
LINEAGE = {0: VersionNode(NO_VERSION, 0)} | {n: VersionNode(n - 1, n) for n in range(1, 11)} | {11: VersionNode(3, 6)}


@pytest.mark.parametrize(
    ("parent", "ahead", "version", "lag"),
    [
        (5, 0, 5, 0),
        (5, 0, 2, 3),
        (5, 2, 5, 2),
        (3, 0, 3, 0),  # case Q20: after the rollback, an episode of 3 has lag 0
        (11, 0, 3, 3),  # batches, not versions
        (11, 1, 0, 7),
        (3, 0, 10, 7),  # an orphan: up seven batches to the common ancestor
        (11, 0, 10, 10),  # 3 + 7
        (11, 0, 4, 4),  # 3 + 1
        (2, 0, 5, 3),  # newer than the parent: the path all the same
    ],
)
def test_lag_is_the_path(parent: int, ahead: int, version: int, lag: int) -> None:  # P14
    assert path_lag(LINEAGE, parent, ahead, version, limit=100) == lag
    assert path_lag(LINEAGE, parent, ahead, version, limit=lag) == lag
    if lag:
        assert path_lag(LINEAGE, parent, ahead, version, limit=lag - 1) == lag, "one over the limit stands for over it"


def test_unknown_versions_are_over_any_limit() -> None:
    assert path_lag(LINEAGE, 10, 0, 12, limit=4) == 5
    assert path_lag(LINEAGE, 12, 0, 10, limit=4) == 5
    assert path_lag({}, NO_VERSION, 0, NO_VERSION, limit=4) == 5


def test_the_walk_is_bounded_by_the_limit() -> None:
    class Counting(dict[int, VersionNode]):
        looked_up = 0

        def __getitem__(self, key: int) -> VersionNode:
            self.looked_up += 1
            return super().__getitem__(key)

    long = Counting({n: VersionNode(n - 1, n) for n in range(100_000)})
    assert path_lag(long, 99_999, 0, 0, limit=4) == 5
    assert long.looked_up < 100


def test_ancestors() -> None:
    assert is_ancestor(LINEAGE, 3, 11)
    assert is_ancestor(LINEAGE, 11, 11)
    assert not is_ancestor(LINEAGE, 4, 11)
    assert not is_ancestor(LINEAGE, 11, 10)
    assert not is_ancestor(LINEAGE, NO_VERSION, 11)
    assert not is_ancestor({}, 3, 3)


@pytest.mark.parametrize(
    ("max_lag", "batch", "lag", "used", "room"),
    [
        (1, 4, 0, 0, 8),  # case Q4
        (1, 4, 0, 3, 5),
        (1, 4, 1, 3, 1),
        (0, 4, 0, 0, 4),  # case Q12: synchronous
        (0, 4, 0, 4, 0),
        (4, 16, 0, 0, 80),
        (4, 16, 2, 60, 0),
        (2, 4, 3, 1, 3),  # never below what the next batch lacks
    ],
)
def test_capacity(max_lag: int, batch: int, lag: int, used: int, room: int) -> None:  # P20
    assert capacity(LedgerLimits(batch_groups=batch, max_lag=max_lag), lag, used) == room


@pytest.mark.parametrize(
    ("ready", "zero_variance", "target"),
    [(3, 0, 16), (20, 0, 16), (3, 63, 16), (3, 64, 3), (0, 64, 1), (20, 64, 16), (15, 200, 15)],
)
def test_batch_target(ready: int, zero_variance: int, target: int) -> None:
    assert batch_target(ready, zero_variance, batch_groups=16, oversample_max=4.0) == target


def test_what_becomes_of_an_ended_group() -> None:
    limits = LedgerLimits(batch_groups=4, max_lag=1, min_group=2)
    assert closing_drop(limits, live=1, lowest=0.0, highest=0.0) is DropReason.TOO_FEW
    assert closing_drop(limits, live=2, lowest=0.5, highest=0.5) is DropReason.ZERO_VARIANCE
    assert closing_drop(limits, live=2, lowest=0.5, highest=0.6) is None
    keep = LedgerLimits(batch_groups=4, max_lag=1, min_group=1, drop_zero_variance=False)
    assert closing_drop(keep, live=1, lowest=0.5, highest=0.5) is None
    assert closing_drop(keep, live=0, lowest=0.0, highest=0.0) is DropReason.TOO_FEW


def test_a_chain_with_a_gap_is_over_any_limit() -> None:  # P14
    assert path_lag({3: VersionNode(2, 3), 7: VersionNode(3, 4)}, 7, 0, 1, limit=4) == 5
    assert path_lag({3: VersionNode(2, 3), 1: VersionNode(0, 1)}, 3, 0, 1, limit=4) == 5


def test_lags_from_one_place() -> None:
    lags = LagView(LINEAGE, 11, 1, limit=4)
    assert [lags.of(version) for version in (11, 3, 2, 0)] == [1, 4, 5, 5]
    assert [lags.over(version) for version in (11, 3, 2)] == [False, False, True]
    assert [lags.is_last_chance(version) for version in (11, 3, 2)] == [False, True, False]
    assert [lags.capped(version) for version in (11, 3, 0)] == [1, 4, 4]


@pytest.mark.parametrize(
    ("size", "running", "scores", "closes"),
    [
        (8, 1, (0.0,) * 6 + (1.0,), True),
        (8, 2, (0.0,) * 5 + (1.0,), False),  # two are missing
        (8, 1, (0.0,) * 5 + (1.0,), False),  # one is played, and one has failed
        (8, 1, (0.0,) * 7, False),  # the one that is missing may bring variance
        (2, 1, (1.0,), False),  # too few
        (1, 1, (), False),
    ],
)
def test_closing_early(size: int, running: int, scores: tuple[float, ...], closes: bool) -> None:  # P18
    limits = LedgerLimits(batch_groups=4, max_lag=1, min_group=2, early_missing=1)
    assert may_close_early(limits, size, running, scores) is closes


def test_restarts_and_retries() -> None:
    limits = LedgerLimits(batch_groups=4, max_lag=1, lag_restarts=2, max_attempts=3)
    assert [is_protected(limits, restarts) for restarts in range(4)] == [False, False, True, True]  # P16
    assert not is_protected(LedgerLimits(batch_groups=4, max_lag=1), 0)
    assert [may_retry(limits, attempt, 2000) for attempt in (2000, 2001, 2002)] == [True, True, False]  # P1
    assert [base_of(attempt) for attempt in (0, 999, 1000, 2003)] == [0, 0, 1000, 2000]


@pytest.mark.parametrize(
    ("seconds", "bucket"),
    [
        *((-1.0, -8), (0.0, -8), (1e-9, -8), (0.25, -4), (1.0, 0), (1.4142, 0), (1.4143, 1), (2.0, 2), (8.0, 6)),
        *((300.0, 16), (2.0**20, 40), (1e12, 40)),
    ],
)
def test_length_buckets(seconds: float, bucket: int) -> None:  # P16
    assert length_bucket(seconds) == bucket
