"""The part of the ledger suite about single attempts: the log of their fates, and a retry whose reply was lost."""

from collections import Counter

from headrace.platform.errors import LedgerError
from headrace.platform.records.delivery import Outcome, PutReply, Submission, Verdict
from headrace.platform.records.status import CancelReason, Fate
from headrace.platform.records.tables import FateRow
from headrace.platform.testing.conformance.ledger_harness import (
    LedgerCase,
    LedgerFactory,
    LedgerHarness,
    limits,
    raises,
)


async def every_attempt_ends_with_one_row(factory: LedgerFactory) -> None:
    """P3: whatever ends an attempt, the log says so once, and the log's counts are those of the stats."""
    async with factory(limits(max_lag=4, batch_groups=4)) as h:
        fence = await h.begin()
        await h.ready(0, 4)
        leased = await h.ledger.lease(fence, 0, 0, 3)
        version = await h.publish(fence, 0, leased[:1])
        await h.publish(fence, version, leased[1:2], fate="dropped:fidelity")
        await h.ledger.drop(fence, [leased[2].group], "nan")
        await h.finish(await h.admit(0, 1), scores=(0.5, 0.5))
        await h.admit(0, 4, size=3)
        stopped = Submission(attempt_id=h.attempt(5, 2), outcome=Outcome.CANCELLED, reason=CancelReason.LAG)
        await h.put(h.done(5, 0, 1.0, 0), h.done(5, 1, 0.0, 0), stopped)
        await h.put(h.failed(6, 0), h.failed(6, 0, 1, retryable=False), h.done(6, 1, 1.0, 0))
        await h.advance(61.0)
        await h.publish(fence, 2, batches=4)
        assert await h.ledger.lease(fence, 3, 0, 1) == []
        await h.admit(3, 1)
        await h.ledger.stop("end")
        rows, _ = await h.ledger.fates(0, 1000)
        endings = Counter(_name(row) for row in rows)
        assert endings == (await _ended(h)), f"the log has {dict(endings)}"
        assert len({row.episode_id for row in rows}) == len(rows) == (await h.stats()).dispatched
        assert {row.version for row in rows if row.fate is Fate.TRAINED} == {version}
        assert {row.version for row in rows if row.fate is not Fate.TRAINED} == {None}
        assert set(endings) == {
            "trained",
            "dropped:fidelity",
            "dropped:nan",
            "dropped:zero_variance",
            "dropped:too_few",
            "dropped:lag",
            "failed:infrastructure",
            "cancelled:lag",
            "cancelled:stopped",
        }


async def fates_come_in_order_and_once(factory: LedgerFactory) -> None:
    """Oldest first, page by page; what was read is forgotten by the next read, and only by it."""
    async with factory(limits(batch_groups=8, min_group=1)) as h:
        await h.begin()
        assert await h.ledger.fates(0, 10) == ([], 0)
        await h.admit(0, 12, size=1)
        await h.put(h.failed(7, 0, retryable=False))
        await h.advance(61.0)
        order = [7, *(group for group in range(12) if group != 7)]
        expected = [_failed(h, group) for group in order]
        assert await h.ledger.fates(0, 5) == (expected[:5], 5), "a deadline's groups come by number"
        assert await h.ledger.fates(0, 5) == (expected[:5], 5), "what is not acknowledged comes again"
        assert await h.ledger.fates(5, 5) == (expected[5:10], 10)
        assert await h.ledger.fates(0, 2) == (expected[5:7], 7), "up to position 5 it is forgotten"
        assert await h.ledger.fates(10, 5) == (expected[10:], 12)
        assert await h.ledger.fates(12, 5) == ([], 12)
        assert await h.ledger.fates(0, 5) == ([], 0)
        await raises(LedgerError, h.ledger.fates(13, 5))
        await raises(LedgerError, h.ledger.fates(12, 0))
        await h.admit(0, 1, size=1)
        await h.put(h.failed(12, 0, retryable=False))
        assert await h.ledger.fates(0, 5) == ([_failed(h, 12)], 13), "positions are never used twice"


async def a_rollback_takes_fates_back(factory: LedgerFactory) -> None:
    """P6: what comes again is in flight again, by name, and ends once more; settled fates stay."""
    async with factory(limits(batch_groups=1, max_lag=4)) as h:
        fence = await h.begin()
        await h.ready(0, 3)
        leased = await h.ledger.lease(fence, 0, 0, 3)
        for parent in range(3):
            await h.publish(fence, parent, leased[parent : parent + 1])
        rows, position = await h.ledger.fates(0, 100)
        assert rows == [_row(h, group, sample, Fate.TRAINED, group + 1) for group in range(3) for sample in range(2)]
        await h.ledger.rollback(fence, 1)
        rows, position = await h.ledger.fates(position, 100)
        assert rows == [_row(h, group, sample, Fate.IN_FLIGHT) for group in (1, 2) for sample in range(2)]
        version = await h.publish(fence, 1, await h.ledger.lease(fence, 1, 0, 2))
        rows, _ = await h.ledger.fates(position, 100)
        assert rows == [_row(h, group, sample, Fate.TRAINED, version) for group in (1, 2) for sample in range(2)]


async def a_lost_retry_is_answered_again(factory: LedgerFactory) -> None:
    """P2: a failed attempt that is put again, because its reply was lost, names the same next attempt, uncounted."""
    async with factory(limits(max_attempts=3)) as h:
        await h.begin()
        await h.admit(0, 1)
        retry = PutReply(Verdict.RETRY, 1)
        assert await h.replies(h.failed(0, 0), h.failed(0, 0)) == [retry, retry]
        assert await h.replies(h.failed(0, 0)) == [retry]
        await h.expect_fates(in_flight=2, failed_infrastructure=1)
        stats = await h.stats()
        assert (stats.dispatched, stats.refused) == (3, {})
        assert await h.ledger.fates(0, 10) == ([_failed(h, 0)], 1)
        other = Submission(attempt_id=h.attempt(0, 0), outcome=Outcome.CANCELLED)
        assert await h.put(h.done(0, 0, 1.0, 0), other) == [Verdict.SUPERSEDED] * 2, "only the failure was answered so"
        assert await h.replies(h.failed(0, 0, 1)) == [PutReply(Verdict.RETRY, 2)]
        assert await h.put(h.failed(0, 0)) == [Verdict.SUPERSEDED], "two attempts ago"
        assert await h.put(h.done(0, 0, 1.0, 0, attempt=2)) == [Verdict.ACCEPTED]
        assert await h.put(h.failed(0, 0, 1)) == [Verdict.SUPERSEDED], "the next attempt has ended"
        assert (await h.stats()).refused == {"superseded": 4}


def _name(row: FateRow) -> str:
    return f"{row.fate}:{row.reason}".rstrip(":")


def _row(h: LedgerHarness, group: int, sample: int, fate: Fate, version: int | None = None) -> FateRow:
    return FateRow(episode_id=str(h.attempt(group, sample)), fate=fate, version=version)


def _failed(h: LedgerHarness, group: int) -> FateRow:
    return FateRow(episode_id=str(h.attempt(group, 0)), fate=Fate.FAILED, reason="infrastructure")


async def _ended(h: LedgerHarness) -> dict[str, int]:
    """The ledger's own count of attempts that have ended."""
    return {fate: count for fate, count in (await h.stats()).fates.items() if count and fate != Fate.IN_FLIGHT}


FATE_CASES: tuple[LedgerCase, ...] = (
    every_attempt_ends_with_one_row,
    fates_come_in_order_and_once,
    a_rollback_takes_fates_back,
    a_lost_retry_is_answered_again,
)
"""Part of `LEDGER_SUITE`."""
