"""The part of the ledger suite about limits: what leaves for lag and age, what is played again, and what is waited for.

Sizes are 2 unless said otherwise; `h.done(group, sample, score, oldest, newest=…)` places a member's action tokens.
"""

from headrace.platform.errors import CommitRefused, Fenced, LedgerError
from headrace.platform.records.delivery import AtRisk, Verdict
from headrace.platform.testing.conformance.ledger_harness import (
    LedgerCase,
    LedgerFactory,
    LedgerHarness,
    limits,
    numbers,
    raises,
)


async def members_over_the_limit_leave(factory: LedgerFactory) -> None:
    """P15, case Q5: a member whose oldest action token is over the limit goes, its siblings are trained."""
    async with factory(limits(batch_groups=4)) as h:
        fence = await h.begin()
        for parent in range(2):
            await h.publish(fence, parent)
        await h.admit(2, 1, size=3)
        await h.put(h.done(0, 0, 1.0, 0, newest=2), h.done(0, 1, 0.5, 1), h.done(0, 2, 0.0, 2))
        leased = await h.ledger.lease(fence, 2, 0, 1)
        assert [member.attempt_id.sample for member in leased[0].members] == [1, 2]
        assert (leased[0].size, leased[0].lag, leased[0].position) == (3, 1, 0)
        assert [(m.oldest_version, m.newest_version) for m in leased[0].members] == [(1, 1), (2, 2)]
        assert [m.payload_hash for m in leased[0].members] == [f"hash of {m.attempt_id}" for m in leased[0].members]
        await h.expect_fates(in_flight=2, dropped_lag=1)
        assert await h.put(h.done(0, 0, 1.0, 0)) == [Verdict.DUPLICATE]
        await h.publish(fence, 2, leased)
        await h.expect_fates(trained=2, dropped_lag=1)


async def what_is_left_must_be_a_group(factory: LedgerFactory) -> None:
    """P15, P20: too few left is a loss to lag; left without variance is that, and counts for the batch's size."""
    async with factory(limits(batch_groups=4)) as h:
        fence = await h.begin()
        await h.admit(0, 2, size=3)
        await h.publish(fence, 0, batches=1)
        await h.put(h.done(0, 0, 1.0, 0), h.done(0, 1, 0.5, 0), h.done(0, 2, 0.0, 1))
        await h.put(h.done(1, 0, 1.0, 0), h.done(1, 1, 0.5, 1), h.done(1, 2, 0.5, 1))
        assert await h.ledger.lease(fence, 1, 1, 1) == []
        await h.expect_fates(dropped_lag=4, dropped_zero_variance=2)
        stats = await h.stats()
        assert (stats.groups_ready, stats.payload_bytes, stats.zero_variance_since_commit) == (0, 0, 1)


async def masked_groups_stay_while_a_token_is_in_time(factory: LedgerFactory) -> None:
    """P15: under mask a member counts by its newest token; those all over it still shape the baseline."""
    async with factory(limits(batch_groups=4, mask_over_lag=True)) as h:
        fence = await h.begin()
        for parent in range(2):
            await h.publish(fence, parent)
        await h.admit(2, 2)
        await h.put(h.done(0, 0, 1.0, 0, newest=1), h.done(0, 1, 0.0, 0))
        await h.put(h.done(1, 0, 1.0, 0), h.done(1, 1, 0.0, 0))
        leased = await h.ledger.lease(fence, 2, 0, 1)
        assert [(group.group, group.lag, len(group.members)) for group in leased] == [(0, 1, 2)]
        await h.expect_fates(in_flight=2, dropped_lag=2)
        await h.publish(fence, 2, leased)
        await h.expect_fates(trained=2, dropped_lag=2)
        assert (await h.stats()).lags == {1: 2}, "no token that entered the loss was further away"


async def the_commit_judges_lag_again(factory: LedgerFactory) -> None:
    """P7, P14: a batch that was leased ahead of a parent is judged by where it began."""
    async with factory(limits(batch_groups=1)) as h:
        fence = await h.begin()
        await h.ready(0, 1)
        leased = await h.ledger.lease(fence, 0, 1, 1)
        await h.publish(fence, 0, batches=2)
        await raises(CommitRefused, h.publish(fence, 1, leased))
        await h.ledger.release(fence, numbers(leased))
        assert await h.ledger.lease(fence, 1, 0, 1) == []
        await h.expect_fates(dropped_lag=2)


async def old_groups_leave(factory: LedgerFactory) -> None:
    """P17: age counts from the server's dispatch stamp; waiting in the queue is part of it."""
    async with factory(limits(max_age_s=50.0, batch_groups=4)) as h:
        fence = await h.begin()
        await h.ready(0, 2)
        await h.advance(40.0)
        fresh = await h.ready(0, 1)
        await h.advance(10.0)
        assert numbers(await h.ledger.lease(fence, 0, 0, 1)) == [0], "50 s are not more than 50 s"
        await h.advance(1.0)
        assert numbers(await h.ledger.lease(fence, 0, 0, 1)) == fresh
        await h.expect_fates(in_flight=4, dropped_age=2)


async def tasks_lost_to_lag_are_played_again(factory: LedgerFactory) -> None:
    """P16, P18: as new groups over the same place, before new places, as often as the limit says; then protected."""
    async with factory(limits(batch_groups=1, lag_restarts=2)) as h:
        fence = await h.begin()
        await h.ready(0, 2)
        for restart, parent in enumerate((0, 1, 2)):
            version = await h.publish(fence, parent, batches=2)
            assert await h.ledger.lease(fence, version, 0, 1) == []
            lost = 2 if restart < 2 else 0
            assert (await h.stats()).restarts_waiting == lost
            tickets = await h.admit(version, 2)
            assert [ticket.group for ticket in tickets] == [2 * restart + 2, 2 * restart + 3]
            assert [ticket.position for ticket in tickets] == ([0, 1] if lost else [6, 7])
            assert (await h.stats()).protection_lost == (0 if lost else 2)
            await h.finish(tickets)
        await h.expect_fates(in_flight=4, dropped_lag=12)


async def restarts_need_room(factory: LedgerFactory) -> None:
    """P16, P20: a task that is played again is admitted like any other; a stop forgets it."""
    async with factory(limits(batch_groups=1, max_lag=0, lag_restarts=1)) as h:
        fence = await h.begin()
        await h.ready(0, 1)
        version = await h.publish(fence, 0)
        assert await h.ledger.lease(fence, version, 0, 1) == []
        assert [ticket.position for ticket in (await h.ledger.admit(version, 2, 5, "worker")).tickets] == [0]
        await h.put(h.cancelled(1, 0), h.cancelled(1, 1))
        stats = await h.stats()
        assert (stats.restarts_waiting, stats.protection_lost) == (0, 1)
        await h.admit(version, 1)
        await h.put(h.cancelled(2, 0), h.cancelled(2, 1))
        assert (await h.stats()).restarts_waiting == 1
        await h.ledger.stop("end")
        assert (await h.stats()).restarts_waiting == 0


async def cancelled_groups_are_restarted(factory: LedgerFactory) -> None:
    """P18: a group whose last attempt was cancelled for lag, and that has too few others, is played again; one that
    failed, or that has enough, is not."""
    async with factory(limits(batch_groups=8, lag_restarts=2)) as h:
        await h.begin()
        await h.admit(0, 4, size=3)
        await h.put(h.cancelled(0, 0), h.done(0, 1, 1.0, 0), h.done(0, 2, 0.0, 0))
        assert (await h.stats()).groups_ready == 1, "it shrank"
        await h.put(h.failed(1, 0, retryable=False), h.done(1, 1, 1.0, 0), h.failed(1, 2, retryable=False))
        await h.put(h.cancelled(2, 0), h.done(2, 1, 1.0, 0), h.failed(2, 2, retryable=False))
        assert (await h.stats()).restarts_waiting == 0
        await h.put(h.done(3, 1, 1.0, 0), h.cancelled(3, 0), h.cancelled(3, 2))
        assert (await h.stats()).restarts_waiting == 1
        assert [ticket.position for ticket in await h.admit(0, 2)] == [3, 5]


async def waiting_groups_lost_to_lag_are_restarted(factory: LedgerFactory) -> None:
    """P16, P18: the task of a group that lost its worker and then its time is played again; a rollback's is not."""
    async with factory(limits(batch_groups=4, lag_restarts=1)) as h:
        fence = await h.begin()
        await h.admit(0, 1)
        await h.ledger.disown("worker")
        version = await h.publish(fence, 0, batches=2)
        assert [(ticket.group, ticket.position) for ticket in await h.admit(version, 1)] == [(1, 0)]
        await h.ledger.disown("worker")
        await h.ledger.rollback(fence, 0)
        assert [(ticket.group, ticket.position) for ticket in await h.admit(0, 1)] == [(2, 2)]
        assert (await h.stats()).protection_lost == 0


async def a_group_closes_at_its_last_chance(factory: LedgerFactory) -> None:
    """P18: with all but `early_missing` members done, if that completes the batch; without variance it waits."""
    async with factory(limits(batch_groups=4, early_missing=1)) as h:
        fence = await h.begin()
        await h.admit(0, 4, size=3)
        await h.put(h.done(0, 0, 1.0, 0), h.done(0, 1, 0.0, 0))
        await h.put(h.done(1, 0, 1.0, 0), h.done(1, 1, 1.0, 0))
        await h.put(h.done(2, 0, 1.0, 0))
        await h.put(h.done(3, 0, 1.0, 0), h.done(3, 1, 0.0, 0), h.done(3, 2, 0.0, 0))
        assert await h.ledger.lease(fence, 0, 0, 2) == [], "it has a later chance"
        assert await h.ledger.lease(fence, 0, 1, 3) == [], "one more would not make this batch"
        assert await h.ledger.lease(fence, 0, 1, 0) == []
        await h.expect_fates(in_flight=12)
        at_risk = await h.ledger.at_risk(fence, 0, 1, 2)
        assert at_risk.playing == 2, "the first group would not be lost, but closed"
        leased = await h.ledger.lease(fence, 0, 1, 2)
        assert [(group.group, len(group.members)) for group in leased] == [(0, 2), (3, 3)]
        await h.expect_fates(in_flight=11, cancelled_lag=1)
        assert await h.put(h.done(0, 2, 1.0, 0)) == [Verdict.GROUP_CLOSED]


async def an_early_group_is_judged_like_any_other(factory: LedgerFactory) -> None:
    """P15, P18: a group that is closed early may still have a member that is over the limit."""
    async with factory(limits(batch_groups=4, early_missing=1)) as h:
        fence = await h.begin()
        version = await h.publish(fence, 0)
        await h.admit(version, 1, size=4)
        await h.put(h.done(0, 0, 1.0, 0), h.done(0, 1, 1.0, 1), h.done(0, 2, 0.0, 1))
        leased = await h.ledger.lease(fence, version, 1, 1)
        assert [member.attempt_id.sample for member in leased[0].members] == [1, 2]
        await h.expect_fates(in_flight=2, cancelled_lag=1, dropped_lag=1)


async def what_the_next_batch_would_lose(factory: LedgerFactory) -> None:
    """P15, P16: counted before the learner starts: played, or ready behind the batch, and at the limit exactly."""
    async with factory(limits(batch_groups=8, lag_restarts=1)) as h:
        fence = await h.begin()
        await h.ready(0, 1)
        await h.publish(fence, 0, batches=2)
        assert await h.ledger.lease(fence, 1, 0, 1) == []
        await h.ready(1, 3)  # the first of them is protected
        await h.admit(1, 2)
        await h.ledger.disown("worker")
        await h.admit(1, 1)
        assert await h.ledger.at_risk(fence, 1, 0, 2) == AtRisk(playing=0, ready=0, protected=0)
        assert await h.ledger.at_risk(fence, 1, 1, 2) == AtRisk(playing=2, ready=1, protected=0)
        assert await h.ledger.at_risk(fence, 1, 1, 0) == AtRisk(playing=2, ready=3, protected=1)
        assert await h.ledger.at_risk(fence, 1, 1, 9) == AtRisk(playing=2, ready=0, protected=0)
        assert await h.ledger.at_risk(fence, 1, 2, 0) == AtRisk(playing=0, ready=0, protected=0), "it is too late"
        await h.expect_fates(in_flight=10, failed_infrastructure=4, dropped_lag=2)
        await raises(Fenced, h.ledger.at_risk(fence - 1, 1, 0, 2))
        await raises(LedgerError, h.ledger.at_risk(fence, 99, 0, 2))


async def masked_groups_are_at_risk_by_their_newest_token(factory: LedgerFactory) -> None:
    """P15: under mask a ready group is lost with its newest token, not with its oldest."""
    async with factory(limits(batch_groups=8, mask_over_lag=True)) as h:
        fence = await h.begin()
        await h.publish(fence, 0)
        await h.admit(1, 2)
        for group, newest in ((0, 0), (1, 1)):
            await h.put(h.done(group, 0, 1.0, 0, newest=newest), h.done(group, 1, 0.0, 0))
        assert await h.ledger.at_risk(fence, 1, 0, 0) == AtRisk(playing=0, ready=1, protected=0)
        assert await h.ledger.at_risk(fence, 1, 1, 0) == AtRisk(playing=0, ready=1, protected=0)
        await _leave(h, fence)


async def _leave(h: LedgerHarness, fence: int) -> None:
    assert await h.ledger.lease(fence, 1, 2, 1) == []
    await h.expect_fates(dropped_lag=4)


LAG_CASES: tuple[LedgerCase, ...] = (
    members_over_the_limit_leave,
    what_is_left_must_be_a_group,
    masked_groups_stay_while_a_token_is_in_time,
    the_commit_judges_lag_again,
    old_groups_leave,
    tasks_lost_to_lag_are_played_again,
    restarts_need_room,
    cancelled_groups_are_restarted,
    waiting_groups_lost_to_lag_are_restarted,
    a_group_closes_at_its_last_chance,
    an_early_group_is_judged_like_any_other,
    what_the_next_batch_would_lose,
    masked_groups_are_at_risk_by_their_newest_token,
)
"""Part of `LEDGER_SUITE`."""
