"""The learner's half of the ledger suite: lag, leases, commits, settling and rollback."""

import asyncio

from msgspec.structs import replace

from headrace.platform.errors import CommitRefused, LedgerError
from headrace.platform.ledger.policy import NO_VERSION
from headrace.platform.records.delivery import Refusal, Verdict
from headrace.platform.records.status import CancelReason
from headrace.platform.testing.conformance.ledger_harness import (
    LedgerCase,
    LedgerFactory,
    LedgerHarness,
    limits,
    numbers,
    raises,
)

_SINGLES = {"min_group": 1, "drop_zero_variance": False, "batch_groups": 8}


async def _killed_after_two_of_six(h: LedgerHarness, fence: int) -> int:
    """8 single-episode groups queued, 6 leased, 2 committed; returns the version."""
    await h.ready(0, 8, size=1)
    leased = await h.ledger.lease(fence, 0, 0, 6)
    return await h.publish(fence, 0, leased[:2])


async def settled_episodes_never_come_again(factory: LedgerFactory) -> None:
    """Case Q1: the learner is killed after a checkpoint; only what was not trained arrives once more."""
    async with factory(limits(**_SINGLES)) as h:
        fence = await h.begin()
        version = await _killed_after_two_of_six(h, fence)
        await h.ledger.settle(fence, version)
        fence = await h.ledger.acquire_learner("second", takeover=True)
        await h.ledger.rollback(fence, version)
        again = await h.ledger.lease(fence, version, 0, 6)
        assert numbers(again) == [2, 3, 4, 5, 6, 7]
        assert [group.deliveries for group in again] == [2, 2, 2, 2, 1, 1]
        await h.expect_fates(trained=2, in_flight=6)
        assert (await h.stats()).groups_consumed == 0


async def published_episodes_come_once_more(factory: LedgerFactory) -> None:
    """Case Q1: the version was only published; resuming before it, all eight arrive, by their files (P6, P9)."""
    async with factory(limits(**_SINGLES)) as h:
        fence = await h.begin()
        await _killed_after_two_of_six(h, fence)
        fence = await h.ledger.acquire_learner("second", takeover=True)
        await h.ledger.rollback(fence, 0)
        await h.expect_fates(in_flight=8)
        again = await h.ledger.lease(fence, 0, 0, 8)
        assert numbers(again) == list(range(8))
        member = again[0].members[0]
        assert (member.payload, member.store_file) == (b"", "episodes/0.parquet")
        assert again[2].members[0].payload == b"payload of " + str(again[2].members[0].attempt_id).encode()
        await h.publish(fence, 0, again)
        await h.expect_fates(trained=8)


async def a_stale_queue_is_evicted(factory: LedgerFactory) -> None:
    """Case Q3: everything is over the limit: counted with a reason, never an empty batch; fresh groups are served."""
    async with factory(limits()) as h:
        fence = await h.begin()
        await h.ready(0, 4)
        await h.publish(fence, 0, batches=2)
        assert await h.ledger.lease(fence, 1, 0, 2) == []
        await h.expect_fates(dropped_lag=8)
        fresh = await h.ready(1, 2)
        assert numbers(await h.ledger.lease(fence, 1, 0, 2)) == fresh


async def lag_is_that_of_the_oldest_action_token(factory: LedgerFactory) -> None:
    """Case Q5: one member began limit + 3 publishes ago; the group is rejected, never trained in silence (P14)."""
    async with factory(limits(max_lag=2, batch_groups=1, group_deadline_s=600.0)) as h:
        fence = await h.begin()
        await h.admit(0, 1)
        for parent in range(5):
            await h.publish(fence, parent)
        await h.put(h.done(0, 0, 1.0, 5), h.done(0, 1, 0.0, 0))
        await h.admit(5, 1)
        await h.put(h.done(1, 0, 1.0, 5), h.done(1, 1, 0.0, 3))
        leased = await h.ledger.lease(fence, 5, 0, 1)
        assert [(group.group, group.lag) for group in leased] == [(1, 2)]
        await h.expect_fates(dropped_lag=2, in_flight=2)


async def a_lease_is_all_or_nothing(factory: LedgerFactory) -> None:
    """Case Q8: 10 ready and 4 wanted leave 6, oldest first; too many wanted take none (P20)."""
    async with factory(limits(batch_groups=10, max_lag=0)) as h:
        fence = await h.begin()
        await h.ready(0, 10)
        assert await h.ledger.lease(fence, 0, 0, 11) == []
        assert await h.ledger.lease(fence, 0, 0, 0) == []
        assert numbers(await h.ledger.lease(fence, 0, 0, 4)) == [0, 1, 2, 3]
        assert (await h.stats()).groups_ready == 6


async def time_in_the_queue_counts(factory: LedgerFactory) -> None:
    """Case Q11: finished at version 0, waiting while 1 to 3 are published, limit 2: not trained."""
    async with factory(limits(max_lag=2)) as h:
        fence = await h.begin()
        await h.ready(0, 2)
        for parent in range(3):
            await h.publish(fence, parent)
        assert await h.ledger.lease(fence, 3, 0, 2) == []
        await h.expect_fates(dropped_lag=4)


async def limit_zero_means_zero(factory: LedgerFactory) -> None:
    """Case Q12: one publish in mid-episode; the largest lag ever leased is 0, and what runs on is told so (P15)."""
    async with factory(limits(max_lag=0)) as h:
        fence = await h.begin()
        tickets = await h.admit(0, 2)
        assert await h.ledger.renew("worker", [0, 1]) == []
        await h.publish(fence, 0)
        assert [notice.reason for notice in await h.ledger.renew("worker", [0, 1])] == [CancelReason.LAG] * 2
        await h.finish(tickets)
        assert await h.ledger.lease(fence, 1, 0, 2) == []
        await h.ready(1, 2)
        assert [group.lag for group in await h.ledger.lease(fence, 1, 0, 2)] == [0, 0]
        await h.expect_fates(dropped_lag=4, in_flight=4)


async def unpublished_batches_count(factory: LedgerFactory) -> None:
    """P14: two batches past the parent are a lag of two, published or not; the commit judges each as it was leased."""
    async with factory(limits(max_lag=2, batch_groups=1)) as h:
        fence = await h.begin()
        await h.ready(0, 3)
        leased = [(await h.ledger.lease(fence, 0, ahead, 1))[0] for ahead in range(3)]
        assert [group.lag for group in leased] == [0, 1, 2]
        await h.publish(fence, 0, leased, batches=3)
        stats = await h.stats()
        assert (stats.head, stats.head_batches) == (1, 3)
        await h.expect_fates(trained=6)


async def commits_meet_every_precondition(factory: LedgerFactory) -> None:
    """P7: parent, reservation, leases, exact fates; a refused commit changes nothing, a repeated one is the same OK."""
    async with factory(limits()) as h:
        fence = await h.begin()
        await h.ready(0, 3)
        leased = await h.ledger.lease(fence, 0, 0, 2)
        number = await h.ledger.stage(fence)
        good = h.request(fence, number, 0, leased)
        names = list(good.fates)
        for wrong in (
            h.request(fence, number, NO_VERSION, leased),
            h.request(fence, number + 1, 0, leased),
            replace(good, fates=dict.fromkeys(names[:3], "trained")),
            replace(good, fates=good.fates | {str(h.attempt(2, 0)): "trained", str(h.attempt(2, 1)): "trained"}),
            replace(good, fates=good.fates | {str(h.attempt(0, 0, 1)): "trained"}),
            replace(good, fates=dict.fromkeys(names, "lost")),
            replace(good, fates={"another.t0.0.0": "trained"}),
        ):
            await raises(CommitRefused, h.ledger.commit(wrong))
        await h.expect_fates(in_flight=6)
        await h.ledger.commit(good)
        await h.ledger.commit(good)
        await h.expect_fates(trained=4, in_flight=2)
        await raises(CommitRefused, h.ledger.commit(replace(good, content_hash="another content")))
        assert (await h.stats()).payload_bytes == len(b"payload of ") * 2 + len(names[0]) * 2


async def lag_counts_along_the_lineage(factory: LedgerFactory) -> None:
    """Case Q20: rollback from 10 to 3, the next commit is 11; an episode of 3 has lag 0, not 8 (P6, P14)."""
    async with factory(limits(max_lag=8, batch_groups=1)) as h:
        fence = await h.begin()
        for parent in range(10):
            await h.publish(fence, parent)
        await h.admit(3, 1)
        await h.admit(10, 1)
        await h.ledger.rollback(fence, 3)
        assert [(n.group, n.reason) for n in await h.ledger.renew("worker", [0, 1])] == [(1, CancelReason.ROLLED_BACK)]
        assert (await h.ledger.admit(10, 2, 1, "worker")).refusal is Refusal.STALE_VERSION
        await h.put(*(h.done(group, sample, float(sample), version) for group, version in ((0, 3), (1, 10))
                      for sample in (0, 1)))  # fmt: skip
        leased = await h.ledger.lease(fence, 3, 0, 2)
        assert [group.lag for group in leased] == [0, 7], "an orphan's lag is the path through the common ancestor"
        assert await h.publish(fence, 3, leased) == 11
        stats = await h.stats()
        assert (stats.head, stats.head_batches) == (11, 4)


async def poison_is_dropped(factory: LedgerFactory) -> None:
    """Case Q24: one group makes the learner die each time; after K deliveries it is dropped and the run goes on."""
    async with factory(limits(max_deliveries=3)) as h:
        fence = await h.begin()
        await h.ready(0, 1)
        for delivery in range(3):
            assert [group.deliveries for group in await h.ledger.lease(fence, 0, 0, 1)] == [delivery + 1]
            fence = await h.ledger.acquire_learner(f"learner {delivery}", takeover=True)
        assert await h.ledger.lease(fence, 0, 0, 1) == []
        await h.expect_fates(dropped_poison=2)
        fresh = await h.ready(0, 1)
        assert numbers(await h.ledger.lease(fence, 0, 0, 1)) == fresh


async def leases_run_out(factory: LedgerFactory) -> None:
    """A lease is renewed or it ends; groups whose lease ended can be neither extended, dropped nor committed."""
    async with factory(limits(max_lag=4)) as h:
        fence = await h.begin()
        await h.ready(0, 2)
        leased = await h.ledger.lease(fence, 0, 0, 2)
        await h.advance(40.0)
        await h.ledger.extend(fence, [0])
        await h.advance(40.0)
        stats = await h.stats()
        assert (stats.groups_leased, stats.groups_ready) == (1, 1)
        await raises(LedgerError, h.ledger.extend(fence, [0, 1]))
        await raises(LedgerError, h.ledger.drop(fence, [1], "nan"))
        await raises(CommitRefused, h.publish(fence, 0, leased))
        await h.ledger.release(fence, [0, 1])
        assert (await h.stats()).groups_ready == 2


async def the_learner_drops_by_name(factory: LedgerFactory) -> None:
    """P3: what the learner cannot use is dropped for a known reason; parts of a group may be, in the commit."""
    async with factory(limits()) as h:
        fence = await h.begin()
        await h.ready(0, 2)
        leased = await h.ledger.lease(fence, 0, 0, 2)
        await raises(LedgerError, h.ledger.drop(fence, [0], "boredom"))
        await h.ledger.drop(fence, [0], "nan")
        await h.publish(fence, 0, leased[1:], fate="dropped:fidelity")
        await h.expect_fates(dropped_nan=2, dropped_fidelity=2)


async def consumed_groups_leave_with_the_checkpoint(factory: LedgerFactory) -> None:
    """P5, P10: until it settles, a consumed group knows its duplicates; afterwards every put for it is late."""
    async with factory(limits()) as h:
        fence = await h.begin()
        await h.ready(0, 2)
        await h.publish(fence, 0, await h.ledger.lease(fence, 0, 0, 2))
        stats = await h.stats()
        assert (stats.groups_consumed, stats.payload_bytes) == (2, 0)
        assert await h.put(h.done(0, 0, 0.0, 0)) == [Verdict.DUPLICATE]
        await h.ledger.settle(fence, 1)
        assert await h.put(h.done(0, 0, 0.0, 0)) == [Verdict.LATE]
        assert (await h.stats()).groups_consumed == 0
        await h.expect_fates(trained=4)
        await raises(LedgerError, h.ledger.settle(fence, 99))


async def a_checkpoint_settles_its_ancestors_only(factory: LedgerFactory) -> None:
    """P5: what a later version consumed is not final yet, and still comes again."""
    async with factory(limits(batch_groups=1, max_lag=4)) as h:
        fence = await h.begin()
        await h.ready(0, 2)
        await h.publish(fence, 0, await h.ledger.lease(fence, 0, 0, 1))
        await h.publish(fence, 1, await h.ledger.lease(fence, 1, 0, 1))
        await h.ledger.settle(fence, 1)
        assert (await h.stats()).groups_consumed == 1
        await h.ledger.rollback(fence, 1)
        await h.expect_fates(trained=2, in_flight=2)
        assert numbers(await h.ledger.lease(fence, 1, 0, 1)) == [1]


async def orphans_do_not_settle(factory: LedgerFactory) -> None:
    """P6: a rollback brings back what non-ancestors consumed and keeps what ancestors did; a stopped run goes on."""
    async with factory(limits(batch_groups=1, max_lag=4)) as h:
        fence = await h.begin()
        await h.ready(0, 2)
        await h.publish(fence, 0, await h.ledger.lease(fence, 0, 0, 1))
        await h.publish(fence, 1, await h.ledger.lease(fence, 1, 0, 1))
        await h.ledger.stop("end")
        fence = await h.ledger.acquire_learner("second", takeover=True)
        await h.ledger.rollback(fence, 1)
        await h.expect_fates(trained=2, in_flight=2)
        assert numbers(await h.ledger.lease(fence, 1, 0, 1)) == [1]
        await h.ledger.settle(fence, 1)
        assert (await h.stats()).groups_consumed == 0
        await h.admit(1, 1)


async def the_head_can_be_watched(factory: LedgerFactory) -> None:
    """A waiting watcher wakes up; one that is behind is answered at once; time over gives the head as it is."""
    async with factory(limits()) as h:
        assert await h.ledger.watch_head(None, 0.0) is None
        waiting = asyncio.create_task(h.ledger.watch_head(None, 30.0))
        fence = await h.begin()
        assert await waiting == 0
        assert await h.ledger.watch_head(None, 30.0) == 0
        assert await h.ledger.watch_head(0, 0.01) == 0
        waiting = asyncio.create_task(h.ledger.watch_head(0, 30.0))
        await h.publish(fence, 0)
        assert await waiting == 1
        waiting = asyncio.create_task(h.ledger.watch_head(1, 30.0))
        await h.ledger.rollback(fence, 0)
        assert await waiting == 0


LEARNER_CASES: tuple[LedgerCase, ...] = (
    settled_episodes_never_come_again,
    published_episodes_come_once_more,
    a_stale_queue_is_evicted,
    lag_is_that_of_the_oldest_action_token,
    a_lease_is_all_or_nothing,
    time_in_the_queue_counts,
    limit_zero_means_zero,
    unpublished_batches_count,
    commits_meet_every_precondition,
    lag_counts_along_the_lineage,
    poison_is_dropped,
    leases_run_out,
    the_learner_drops_by_name,
    consumed_groups_leave_with_the_checkpoint,
    a_checkpoint_settles_its_ancestors_only,
    orphans_do_not_settle,
    the_head_can_be_watched,
)
"""Part of `LEDGER_SUITE`."""
