"""The part of the ledger suite about who is the learner: fences, and when the run may be taken from another."""

from headrace.platform.errors import CommitRefused, Fenced, LedgerError
from headrace.platform.records.delivery import Refusal
from headrace.platform.testing.conformance.ledger_harness import (
    LedgerCase,
    LedgerFactory,
    limits,
    numbers,
    raises,
)


async def one_learner_wins(factory: LedgerFactory) -> None:
    """Case Q18: two learners publish at once; the older one is fenced off and the head is never torn (P7)."""
    async with factory(limits()) as h:
        old = await h.begin()
        await h.ready(0, 2)
        leased = await h.ledger.lease(old, 0, 0, 2)
        number = await h.ledger.stage(old)
        new = await h.ledger.acquire_learner("second", takeover=True)
        assert new > old
        await raises(Fenced, h.ledger.commit(h.request(old, number, 0, leased)))
        for call in (
            h.ledger.lease(old, 0, 0, 1),
            h.ledger.extend(old, [0]),
            h.ledger.release(old, [0]),
            h.ledger.drop(old, [0], "nan"),
            h.ledger.at_risk(old, 0, 0, 1),
            h.ledger.stage(old),
            h.ledger.settle(old, 0),
            h.ledger.rollback(old, 0),
        ):
            await raises(Fenced, call)
        assert (await h.stats()).head == 0
        assert numbers(await h.ledger.lease(new, 0, 0, 2)) == [0, 1], "the old learner's leases are released"
        assert await h.ledger.stage(new) == number + 1, "a number is never used twice (P6)"
        await raises(CommitRefused, h.ledger.commit(h.request(new, number, 0)))


async def a_stop_takes_the_run_from_its_learner(factory: LedgerFactory) -> None:
    """Whatever a learner still tries after a stop is Fenced and changes nothing; the next one resumes (P6, P7)."""
    async with factory(limits(max_lag=4)) as h:
        fence = await h.begin()
        await h.ready(0, 3)
        leased = await h.ledger.lease(fence, 0, 0, 2)
        before = h.request(fence, await h.ledger.stage(fence), 0, leased[:1])
        await h.ledger.commit(before)
        number = await h.ledger.stage(fence)
        await h.ledger.stop("end")
        held = [leased[1].group]
        for call in (
            h.ledger.commit(h.request(fence, number, 1, leased[1:])),
            h.ledger.commit(h.request(fence, number, 1)),
            h.ledger.lease(fence, 1, 0, 1),
            h.ledger.extend(fence, held),
            h.ledger.release(fence, held),
            h.ledger.drop(fence, held, "nan"),
            h.ledger.stage(fence),
            h.ledger.settle(fence, 1),
            h.ledger.rollback(fence, 0),
        ):
            await raises(Fenced, call)
        await h.ledger.commit(before)  # its reply may have been lost
        await h.expect_fates(trained=2, dropped_stopped=4)
        stats = await h.stats()
        assert (stats.head, stats.groups_leased, stats.fates["in_flight"], stats.stopped) == (1, 0, 0, True)
        after = await h.ledger.acquire_learner("second", takeover=True)
        assert after > fence + 1, "the fence of the stop belongs to nobody"
        await raises(CommitRefused, h.ledger.commit(h.request(after, number, 1)))
        assert (await h.ledger.admit(1, 2, 1, "worker")).refusal is Refusal.STOPPED, "only a rollback opens the run"
        await h.ledger.rollback(after, 1)
        await h.ready(1, 1)
        await h.publish(after, 1, await h.ledger.lease(after, 1, 0, 1))
        await h.expect_fates(trained=4, dropped_stopped=4)


async def a_living_learner_keeps_the_run(factory: LedgerFactory) -> None:
    """Case Q18: a second learner that starts by mistake is told who holds the run, and changes nothing."""
    async with factory(limits(learner_term_s=10.0)) as h:
        fence = await h.begin()
        await h.ready(0, 2)
        await h.ledger.lease(fence, 0, 0, 1)
        await h.advance(9.0)
        message = await raises(Fenced, h.ledger.acquire_learner("second"))
        assert "first" in message, f"the message does not say who holds the run: {message}"
        await h.ledger.extend(fence, [0])
        await h.advance(9.0)
        stats = await h.stats()
        assert (stats.learner, stats.learner_silent_s, stats.groups_leased) == ("first", 9.0, 1)
        await raises(Fenced, h.ledger.acquire_learner("second"))
        await raises(Fenced, h.ledger.stage(fence - 1))
        await h.advance(2.0)
        assert await h.ledger.acquire_learner("second") == fence + 1, "another's call does not keep the run"
        stats = await h.stats()
        assert (stats.learner, stats.learner_silent_s, stats.groups_ready) == ("second", 0.0, 2)


async def the_run_changes_hands(factory: LedgerFactory) -> None:
    """P6: to the same holder at once, to one who knows that the old one is gone, and after a stop to anybody."""
    async with factory(limits()) as h:
        fence = await h.begin()
        assert await h.ledger.acquire_learner("first") == fence + 1
        assert await h.ledger.acquire_learner("second", takeover=True) == fence + 2
        await h.ledger.stop("end")
        stats = await h.stats()
        assert (stats.learner, stats.learner_silent_s) == ("", 0.0)
        assert await h.ledger.acquire_learner("third") == fence + 4
        await raises(LedgerError, h.ledger.acquire_learner(""))


async def numbers_are_above_what_others_used(factory: LedgerFactory) -> None:
    """P6: a number is reserved above all that the ledger gave and above the floor, which manifests and blobs set."""
    async with factory(limits()) as h:
        fence = await h.begin()
        staged = [await h.ledger.stage(fence, floor) for floor in (0, 7, 3, 9, 9)]
        assert staged == [1, 7, 8, 9, 10]
        await h.ledger.commit(h.request(fence, 8, 0))
        await raises(CommitRefused, h.ledger.commit(h.request(fence, 6, 8)))


async def what_a_lost_reply_granted_comes_back(factory: LedgerFactory) -> None:
    """P20: a learner that names all it holds gives back what it never heard of; one group too many changes nothing."""
    async with factory(limits()) as h:
        fence = await h.begin()
        await h.ready(0, 3)
        await h.ledger.lease(fence, 0, 0, 3)
        await raises(LedgerError, h.ledger.extend(fence, [1, 99], exactly=True))
        assert (await h.stats()).groups_leased == 3
        await h.ledger.extend(fence, [1], exactly=True)
        assert numbers(await h.ledger.lease(fence, 0, 0, 2)) == [0, 2]
        await h.ledger.extend(fence, [], exactly=True)
        assert (await h.stats()).groups_ready == 3


FENCE_CASES: tuple[LedgerCase, ...] = (
    one_learner_wins,
    a_stop_takes_the_run_from_its_learner,
    a_living_learner_keeps_the_run,
    the_run_changes_hands,
    numbers_are_above_what_others_used,
    what_a_lost_reply_granted_comes_back,
)
"""Part of `LEDGER_SUITE`."""
