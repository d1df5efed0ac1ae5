"""The part of the ledger suite about dispatch leases: who may put what, and what becomes of the work of the silent."""

from headrace.platform.errors import LedgerError
from headrace.platform.records.delivery import CancelNotice, GroupTicket, PutReply, Refusal, Verdict
from headrace.platform.records.status import CancelReason
from headrace.platform.testing.conformance.ledger_harness import (
    LedgerCase,
    LedgerFactory,
    LedgerHarness,
    limits,
    raises,
)


async def tickets_say_what_to_play(factory: LedgerFactory) -> None:
    """P1: a new group is its own place in the task source, and all of its slots are to be played."""
    async with factory(limits()) as h:
        await h.begin()
        tickets = await h.admit(0, 2, size=3)
        assert [(ticket.group, ticket.position, ticket.size) for ticket in tickets] == [(0, 0, 3), (1, 1, 3)]
        assert {ticket.attempts for ticket in tickets} == {((0, 0), (1, 0), (2, 0))}
        assert {round(ticket.deadline_s - ticket.dispatched_s, 3) for ticket in tickets} == {60.0}
        await raises(LedgerError, h.ledger.admit(0, 2, 1, ""))
        await raises(LedgerError, h.ledger.renew("", [0]))
        await raises(LedgerError, h.ledger.disown(""))


async def silent_workers_lose_their_groups(factory: LedgerFactory) -> None:
    """P2, case Q10: what was being played has failed, another worker goes on, and the late result is refused."""
    async with factory(limits(dispatch_lease_s=10.0)) as h:
        await h.begin()
        first = (await h.admit(0, 1, size=3, holder="one"))[0]
        await h.put(h.done(0, 0, 1.0, 0))
        await h.advance(8.0)
        assert await h.ledger.renew("one", [0]) == []
        await h.advance(8.0)
        assert (await h.stats()).groups_waiting == 0
        await h.advance(3.0)
        stats = await h.stats()
        assert (stats.groups_open, stats.groups_waiting, stats.dispatched) == (1, 1, 5)
        await h.expect_fates(in_flight=3, failed_infrastructure=2)
        assert await h.put(h.done(0, 1, 0.0, 0, attempt=1)) == [Verdict.SUPERSEDED], "it was given to nobody yet"
        ticket = await _only(h, "two")
        assert (ticket.group, ticket.version, ticket.attempts) == (0, 0, ((1, 1), (2, 1))), "what is done stays"
        assert (ticket.dispatched_s, ticket.deadline_s) == (first.dispatched_s, first.deadline_s)
        assert await h.put(h.done(0, 1, 0.0, 0)) == [Verdict.SUPERSEDED]
        assert await h.put(h.failed(0, 2)) == [Verdict.SUPERSEDED], "the next attempt is another worker's"
        await h.finish([ticket])
        assert (await h.stats()).groups_ready == 1
        assert (await h.stats()).refused == {"superseded": 3}


async def known_deaths_need_no_waiting(factory: LedgerFactory) -> None:
    """P2: the groups of a worker that is known to be gone wait at once; those of others are left alone."""
    async with factory(limits()) as h:
        await h.begin()
        await h.admit(0, 2, holder="one")
        await h.admit(0, 1, holder="two")
        await h.ledger.disown("one")
        await h.ledger.disown("one")
        await h.ledger.disown("nobody")
        assert (await h.stats()).groups_waiting == 2
        await h.expect_fates(in_flight=6, failed_infrastructure=4)
        assert [ticket.group for ticket in await h.admit(0, 2, holder="two")] == [0, 1]
        assert await h.ledger.renew("two", [0, 1, 2]) == []


async def retries_of_the_lost_are_answered_to_nobody_else(factory: LedgerFactory) -> None:
    """P2: a retry that a put was answered with is its own; after its worker's death it belongs to the next one."""
    async with factory(limits(max_attempts=4)) as h:
        await h.begin()
        await h.admit(0, 1, holder="one")
        retry = PutReply(Verdict.RETRY, 1)
        assert await h.replies(h.failed(0, 0), h.failed(0, 0)) == [retry, retry]
        await h.ledger.disown("one")
        assert await h.put(h.failed(0, 0), h.failed(0, 0, 1)) == [Verdict.SUPERSEDED] * 2
        assert (await _only(h, "two")).attempts == ((0, 2), (1, 1))
        await h.expect_fates(in_flight=2, failed_infrastructure=3)


async def lost_attempts_are_bounded(factory: LedgerFactory) -> None:
    """P1: the death of a worker costs an attempt; a group without any left is closed, with what is done."""
    async with factory(limits(max_attempts=2)) as h:
        await h.begin()
        await h.admit(0, 2, size=3)
        await h.put(h.done(0, 0, 1.0, 0), h.done(0, 1, 0.0, 0))
        await h.put(h.done(1, 0, 1.0, 0))
        await h.ledger.disown("worker")
        await h.admit(0, 2)
        await h.ledger.disown("worker")
        stats = await h.stats()
        assert (stats.groups_open, stats.groups_waiting, stats.groups_ready) == (0, 0, 1)
        await h.expect_fates(in_flight=2, failed_infrastructure=6, dropped_too_few=1)
        assert await h.put(h.done(0, 2, 1.0, 0, attempt=1)) == [Verdict.GROUP_CLOSED]


async def waiting_groups_need_no_room(factory: LedgerFactory) -> None:
    """P19: they have it; and they come with the version that they began with, whatever was asked for (P18)."""
    async with factory(limits()) as h:
        fence = await h.begin()
        await h.admit(0, 4, holder="one")
        await h.ledger.disown("one")
        version = await h.publish(fence, 0)
        admission = await h.ledger.admit(version, 2, 3, "two")
        assert [(ticket.group, ticket.version) for ticket in admission.tickets] == [(0, 0), (1, 0), (2, 0)]
        assert admission.refusal is Refusal.NONE
        assert [ticket.group for ticket in await h.admit(version, 1)] == [3]
        assert (await h.ledger.admit(version, 2, 1, "two")).refusal is Refusal.CAPACITY
        assert (await h.ledger.admit(99, 2, 1, "two")).refusal is Refusal.STALE_VERSION


async def waiting_groups_must_still_be_in_time(factory: LedgerFactory) -> None:
    """P15: nobody plays what can no longer be trained: over the limit, or on a version that was rolled back (P14)."""
    async with factory(limits(max_lag=1, batch_groups=4)) as h:
        fence = await h.begin()
        await h.admit(0, 1)
        await h.put(h.done(0, 0, 1.0, 0))
        await h.ledger.disown("worker")
        version = await h.publish(fence, 0, batches=2)
        assert [ticket.group for ticket in await h.admit(version, 1)] == [1]
        await h.expect_fates(in_flight=2, failed_infrastructure=1, cancelled_lag=1, dropped_lag=1)
        await h.ledger.disown("worker")
        await h.ledger.rollback(fence, 0)
        assert [ticket.group for ticket in await h.admit(0, 1)] == [2]
        assert (await h.stats()).fates["cancelled:rolled_back"] == 2
        assert (await h.stats()).groups_open == 1


async def renewals_say_what_to_abandon(factory: LedgerFactory) -> None:
    """P15, P18: finished or unknown, another worker's, rolled back, or certain to be late. Under mask an episode may
    still get newer tokens, so it goes on."""
    for mask in (False, True):
        async with factory(limits(batch_groups=4, mask_over_lag=mask)) as h:
            fence = await h.begin()
            tickets = await h.admit(0, 4, holder="one")
            await h.finish(tickets[:1])
            await h.ledger.disown("one")
            await h.admit(0, 1, holder="two")
            await h.admit(0, 1, holder="one")
            stopped, superseded = CancelReason.STOPPED, CancelReason.SUPERSEDED
            expected = [(99, stopped), (0, stopped), (1, superseded), (3, superseded)]
            assert await h.ledger.renew("one", [99, 0, 1, 2, 3]) == [CancelNotice(*notice) for notice in expected]
            await h.publish(fence, 0, batches=2)
            late = [] if mask else [CancelNotice(2, CancelReason.LAG)]
            assert await h.ledger.renew("one", [2]) == late
            await h.admit(1, 1, holder="three")
            await h.ledger.rollback(fence, 0)
            group = (await h.stats()).dispatch_sequence - 1
            assert await h.ledger.renew("three", [group]) == [CancelNotice(group, CancelReason.ROLLED_BACK)]


async def a_deadline_also_ends_what_waits(factory: LedgerFactory) -> None:
    """P19, case E7: a group that nobody takes up again holds its room until its deadline, not for ever."""
    async with factory(limits()) as h:
        await h.begin()
        await h.admit(0, 1)
        await h.ledger.disown("worker")
        await h.advance(61.0)
        stats = await h.stats()
        assert (stats.groups_open, stats.groups_waiting) == (0, 0)
        await h.expect_fates(failed_infrastructure=4)
        assert stats.slot_seconds == {}, "nobody played the second attempts, and the first ones ended at once"


async def _only(h: LedgerHarness, holder: str) -> GroupTicket:
    return (await h.admit(0, 1, holder=holder))[0]


DISPATCH_CASES: tuple[LedgerCase, ...] = (
    tickets_say_what_to_play,
    silent_workers_lose_their_groups,
    known_deaths_need_no_waiting,
    retries_of_the_lost_are_answered_to_nobody_else,
    lost_attempts_are_bounded,
    waiting_groups_need_no_room,
    waiting_groups_must_still_be_in_time,
    renewals_say_what_to_abandon,
    a_deadline_also_ends_what_waits,
)
"""Part of `LEDGER_SUITE`."""
