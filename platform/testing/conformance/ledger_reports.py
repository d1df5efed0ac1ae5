"""The part of the ledger suite about what is counted beside the fates, and versions of environments (P16, P17)."""

from headrace.platform.records.delivery import Verdict
from headrace.platform.testing.conformance.ledger_harness import LedgerCase, LedgerFactory, limits


async def trained_lags_are_counted(factory: LedgerFactory) -> None:
    """P14: by the lag that each attempt was trained with; a rollback takes back what it undoes (P6)."""
    async with factory(limits(batch_groups=1, max_lag=4)) as h:
        fence = await h.begin()
        await h.admit(0, 2)
        await h.publish(fence, 0)
        await h.put(h.done(0, 0, 1.0, 0), h.done(0, 1, 0.0, 1), h.done(1, 0, 1.0, 1), h.done(1, 1, 0.0, 1))
        await h.publish(fence, 1, await h.ledger.lease(fence, 1, 1, 1))
        await h.publish(fence, 2, await h.ledger.lease(fence, 2, 0, 1), fate="dropped:nan")
        assert (await h.stats()).lags == {2: 1, 1: 1}
        await h.ledger.rollback(fence, 1)
        assert (await h.stats()).lags == {}
        await h.expect_fates(in_flight=4)


async def play_time_is_counted_by_fate(factory: LedgerFactory) -> None:
    """P16: slot-seconds and lengths of every attempt that ended, on the server's clock (P12); time in the queue is no
    play. 4 s are bucket 4, 5 s too, 6 s bucket 5, 16 s bucket 8."""
    async with factory(limits(max_attempts=2)) as h:
        fence = await h.begin()
        await h.admit(0, 2)
        await h.advance(4.0)
        await h.put(h.done(0, 0, 1.0, 0), h.failed(1, 0))
        await h.advance(1.0)
        await h.put(h.done(0, 1, 0.0, 0))
        await h.advance(5.0)
        await h.put(h.failed(1, 0, 1), h.cancelled(1, 1))
        await h.advance(20.0)
        stats = await h.stats()
        assert stats.slot_seconds == {"failed:infrastructure": 10.0, "cancelled:lag": 10.0}
        assert stats.lengths == {"failed": {4: 1, 5: 1}, "cancelled": {6: 1}}
        await h.publish(fence, 0, await h.ledger.lease(fence, 0, 0, 1))
        stats = await h.stats()
        assert stats.slot_seconds["trained"] == 9.0
        assert stats.lengths["trained"] == {4: 2}
        assert await h.put(h.done(0, 1, 0.0, 0), h.failed(1, 0, 1)) == [Verdict.DUPLICATE, Verdict.LATE]
        assert (await h.stats()).slot_seconds == stats.slot_seconds
        await h.ledger.rollback(fence, 0)
        assert "trained" not in (await h.stats()).lengths, "what comes again has not ended"
        await h.ledger.stop("end")
        assert (await h.stats()).slot_seconds["dropped:stopped"] == 9.0


async def waiting_is_no_play(factory: LedgerFactory) -> None:
    """P16: an attempt begins when it is given out; one that nobody played has no length."""
    async with factory(limits(max_attempts=3)) as h:
        await h.begin()
        await h.admit(0, 1)
        await h.advance(4.0)
        await h.ledger.disown("worker")
        await h.advance(10.0)
        tickets = await h.admit(0, 1)
        await h.advance(2.0)
        await h.ledger.disown("worker")
        await h.advance(10.0)
        await h.ledger.stop("end")
        assert len(tickets) == 1
        stats = await h.stats()
        assert stats.slot_seconds == {"failed:infrastructure": 12.0}
        assert stats.lengths == {"failed": {4: 2, 2: 2}}
        await h.expect_fates(failed_infrastructure=4, cancelled_stopped=2)


async def environments_must_be_allowed(factory: LedgerFactory) -> None:
    """P17: from any version before the first call, then from those of the set; the drop is counted, once."""
    async with factory(limits(min_group=1, drop_zero_variance=False, batch_groups=8)) as h:
        await h.begin()
        await h.admit(0, 6, size=1)
        await h.put(h.done(0, 0, 1.0, 0, environment="shop@1"))
        await h.ledger.allow("shop", ["2", "3"])
        for group, environment in enumerate(("shop@1", "shop@2", "shop@3", "bank@1", ""), start=1):
            assert await h.put(h.done(group, 0, 1.0, 0, environment=environment)) == [Verdict.ACCEPTED]
        await h.expect_fates(in_flight=5, dropped_environment=1)
        assert await h.put(h.done(1, 0, 1.0, 0, environment="shop@1")) == [Verdict.LATE]
        await h.ledger.allow("shop", ["1"])
        await h.admit(0, 2, size=1)
        await h.put(h.done(6, 0, 1.0, 0, environment="shop@1"), h.done(7, 0, 1.0, 0, environment="shop@2"))
        await h.expect_fates(in_flight=6, dropped_environment=2)
        assert (await h.stats()).score_count == 8, "it was played, whatever became of it"


async def a_group_never_mixes_environments(factory: LedgerFactory) -> None:
    """P17: during a change of version both are allowed, but the first one that is done decides for its group."""
    async with factory(limits(batch_groups=4)) as h:
        fence = await h.begin()
        await h.ledger.allow("shop", ["1", "2"])
        await h.admit(0, 1, size=5)
        endings = ["shop@3", "shop@1", "shop@2", "", "shop@1"]
        for sample, environment in enumerate(endings):
            await h.put(h.done(0, sample, float(sample), 0, environment=environment))
        leased = await h.ledger.lease(fence, 0, 0, 1)
        assert [member.attempt_id.sample for member in leased[0].members] == [1, 3, 4]
        await h.expect_fates(in_flight=3, dropped_environment=2)
        assert await h.put(h.done(0, 2, 2.0, 0, environment="shop@2")) == [Verdict.DUPLICATE]


REPORT_CASES: tuple[LedgerCase, ...] = (
    trained_lags_are_counted,
    play_time_is_counted_by_fate,
    waiting_is_no_play,
    environments_must_be_allowed,
    a_group_never_mixes_environments,
)
"""Part of `LEDGER_SUITE`."""
