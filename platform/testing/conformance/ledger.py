"""What every `Ledger` must do. Run each function of `LEDGER_SUITE` on a factory of yours.

A factory takes limits and gives an async context manager around a `LedgerHarness` with a fresh ledger. This file holds
the workers' half (admission, put, deadlines, stop); the other `ledger_*.py` files have theirs.
"""

from headrace.platform.errors import LedgerError
from headrace.platform.records.delivery import Outcome, Refusal, Submission, Verdict
from headrace.platform.records.ids import AttemptId
from headrace.platform.records.status import CancelReason, Purpose
from headrace.platform.testing.conformance.ledger_dispatch import DISPATCH_CASES
from headrace.platform.testing.conformance.ledger_fates import FATE_CASES
from headrace.platform.testing.conformance.ledger_fence import FENCE_CASES
from headrace.platform.testing.conformance.ledger_harness import LedgerCase, LedgerFactory, limits, raises
from headrace.platform.testing.conformance.ledger_lag import LAG_CASES
from headrace.platform.testing.conformance.ledger_learner import LEARNER_CASES
from headrace.platform.testing.conformance.ledger_recovery import RECOVERY_CASES
from headrace.platform.testing.conformance.ledger_reports import REPORT_CASES
from headrace.platform.testing.conformance.ledger_restart import RESTART_CASES


async def finished_groups_free_their_room_at_once(factory: LedgerFactory) -> None:
    """Case Q2: what has ended is not running, whether or not anybody has collected it."""
    async with factory(limits(batch_groups=4, max_lag=0)) as h:
        await h.begin()
        tickets = await h.admit(0, 4)
        assert (await h.ledger.admit(0, 2, 1, "worker")).refusal is Refusal.CAPACITY
        await h.finish(tickets, scores=(1.0, 1.0))
        assert (await h.stats()).groups_open == 0
        await h.admit(0, 4)


async def capacity_counts_batches_not_versions(factory: LedgerFactory) -> None:
    """Case Q4: after 100 batches, limit 1 and batch 4 admit (1+1)*4 = 8 groups (P20)."""
    async with factory(limits(batch_groups=4)) as h:
        fence = await h.begin()
        version = await h.publish(fence, 0, batches=100)
        assert len((await h.ledger.admit(version, 2, 3, "worker")).tickets) == 3
        assert len((await h.ledger.admit(version, 2, 408, "worker")).tickets) == 5
        refused = await h.ledger.admit(version, 2, 1, "worker")
        assert refused.refusal is Refusal.CAPACITY
        assert not refused.tickets


async def older_versions_get_less_room(factory: LedgerFactory) -> None:
    """P20: one batch behind, one batch less; a leased group counts until its version is published."""
    async with factory(limits(batch_groups=4)) as h:
        fence = await h.begin()
        await h.publish(fence, 0)
        assert len((await h.ledger.admit(0, 2, 99, "worker")).tickets) == 4
        await h.finish(await h.admit(1, 4))
        await h.ledger.lease(fence, 1, 0, 4)
        assert (await h.ledger.admit(1, 2, 1, "worker")).refusal is Refusal.CAPACITY


async def a_full_queue_refuses_and_evicts_nothing(factory: LedgerFactory) -> None:
    """Case Q7: the producer is told so; what is queued stays."""
    async with factory(limits()) as h:
        await h.begin()
        await h.ready(0, 4)
        admission = await h.ledger.admit(0, 2, 1, "worker")
        assert admission.refusal is Refusal.CAPACITY
        assert (await h.stats()).groups_ready == 4
        await h.expect_fates(in_flight=8)


async def admitted_attempts_are_never_blocked(factory: LedgerFactory) -> None:
    """Case Q23: the queue is full of incomplete groups, and their last members go through (P19)."""
    async with factory(limits()) as h:
        await h.begin()
        tickets = await h.admit(0, 4)
        for ticket in tickets:
            assert await h.put(h.done(ticket.group, 0, 1.0, 0)) == [Verdict.ACCEPTED]
        assert (await h.ledger.admit(0, 2, 1, "worker")).refusal is Refusal.CAPACITY
        for ticket in tickets:
            assert await h.put(h.done(ticket.group, 1, 0.0, 0)) == [Verdict.ACCEPTED]
        assert (await h.stats()).groups_ready == 4


async def admission_says_why_not(factory: LedgerFactory) -> None:
    """No head, an unknown version, one over the limit: three refusals that clear by themselves."""
    async with factory(limits()) as h:
        assert (await h.ledger.admit(0, 2, 1, "worker")).refusal is Refusal.NO_HEAD
        fence = await h.begin()
        assert (await h.ledger.admit(7, 2, 1, "worker")).refusal is Refusal.STALE_VERSION
        await h.publish(fence, 0, batches=2)
        assert (await h.ledger.admit(0, 2, 1, "worker")).refusal is Refusal.STALE_VERSION
        tickets = await h.admit(1, 2)
        assert [ticket.group for ticket in tickets] == [0, 1], "group numbers are the dispatch sequence, from 0 (P10)"
        await raises(LedgerError, h.ledger.admit(1, 1, 1, "worker"))


async def late_attempts_are_refused_and_counted(factory: LedgerFactory) -> None:
    """Case Q10: the slot was given to a new attempt; the old one's result comes in after all (P2)."""
    async with factory(limits()) as h:
        await h.begin()
        await h.admit(0, 1)
        reply = (await h.replies(h.failed(0, 0)))[0]
        assert (reply.verdict, reply.next_attempt) == (Verdict.RETRY, 1)
        await h.expect_fates(in_flight=2, failed_infrastructure=1)
        assert await h.put(h.done(0, 0, 1.0, 0)) == [Verdict.SUPERSEDED]
        assert await h.put(h.done(0, 0, 1.0, 0, attempt=1)) == [Verdict.ACCEPTED]
        assert (await h.stats()).refused == {"superseded": 1}


async def every_attempt_is_accepted_once(factory: LedgerFactory) -> None:
    """P2: the same again is a duplicate, another content a conflict, before and after the group has closed."""
    async with factory(limits()) as h:
        await h.begin()
        await h.admit(0, 1, size=3)
        first = h.done(0, 0, 1.0, 0)
        other = Submission(
            attempt_id=first.attempt_id, outcome=Outcome.DONE, payload=b"other", payload_hash="other", score=5.0
        )
        assert await h.put(first, first, other) == [Verdict.ACCEPTED, Verdict.DUPLICATE, Verdict.CONFLICT]
        failed = [h.failed(0, sample, retryable=False) for sample in (1, 1, 2)]
        assert await h.put(*failed) == [Verdict.ACCEPTED, Verdict.DUPLICATE, Verdict.ACCEPTED]
        assert await h.put(first) == [Verdict.LATE], "too few members were left, so the group has finished"
        assert await h.put(h.done(99, 0, 1.0, 0)) == [Verdict.CONFLICT], "group 99 was never dispatched"
        stats = await h.stats()
        assert stats.refused == {"duplicate": 2, "conflict": 2, "late": 1}
        assert (stats.score_sum, stats.score_count) == (1.0, 1)


async def closed_groups_take_nothing_more(factory: LedgerFactory) -> None:
    """P2: a member that the group's deadline ended may not come back into a group that is ready."""
    async with factory(limits()) as h:
        await h.begin()
        await h.admit(0, 1, size=3)
        await h.put(h.done(0, 0, 1.0, 0), h.done(0, 1, 0.0, 0))
        await h.advance(61.0)
        assert await h.put(h.done(0, 2, 1.0, 0)) == [Verdict.GROUP_CLOSED]
        assert await h.put(h.done(0, 1, 0.0, 0)) == [Verdict.DUPLICATE]
        assert (await h.stats()).groups_ready == 1
        await h.expect_fates(in_flight=2, failed_infrastructure=1)


async def retries_are_bounded(factory: LedgerFactory) -> None:
    """A slot gets `max_attempts` tries, each with its fate (P1, P3)."""
    async with factory(limits(max_attempts=3, min_group=1)) as h:
        await h.begin()
        await h.admit(0, 1, size=1)
        verdicts = [(await h.put(h.failed(0, 0, attempt)))[0] for attempt in range(3)]
        assert verdicts == [Verdict.RETRY, Verdict.RETRY, Verdict.ACCEPTED]
        await h.expect_fates(failed_infrastructure=3)


async def a_deadline_frees_the_group(factory: LedgerFactory) -> None:
    """Case E7: one episode never ends; its siblings are used, and another group's are too few."""
    async with factory(limits()) as h:
        await h.begin()
        await h.admit(0, 2, size=3)
        await h.put(h.done(0, 0, 1.0, 0), h.done(0, 1, 0.0, 0), h.done(1, 0, 1.0, 0))
        await h.advance(59.0)
        assert (await h.stats()).groups_open == 2
        await h.advance(2.0)
        stats = await h.stats()
        assert (stats.groups_open, stats.groups_ready) == (0, 1)
        await h.expect_fates(in_flight=2, failed_infrastructure=3, dropped_too_few=1)


async def one_call_or_many(factory: LedgerFactory) -> None:
    """Case Q15: several groups put in one call give what one call each gives."""
    outcomes = []
    for together in (True, False):
        async with factory(limits(max_attempts=2)) as h:
            await h.begin()
            await h.admit(0, 3)
            batch = [
                h.done(0, 0, 1.0, 0),
                h.failed(1, 0),
                h.done(0, 1, 0.0, 0),
                h.done(1, 0, 1.0, 0),
                h.done(1, 0, 1.0, 0, attempt=1),
                h.done(2, 0, 0.5, 0),
                h.done(2, 1, 0.5, 0),
                h.done(2, 1, 0.5, 0),
            ]
            calls = [batch] if together else [[submission] for submission in batch]
            verdicts = [verdict for call in calls for verdict in await h.put(*call)]
            stats = await h.stats()
            outcomes.append((verdicts, stats.fates, stats.refused, stats.groups_ready, stats.score_sum))
    assert outcomes[0] == outcomes[1], f"together {outcomes[0]}, one by one {outcomes[1]}"


async def groups_without_variance_leave_at_once(factory: LedgerFactory) -> None:
    """P20: they are dropped by name, free their room and leave no payload; a commit starts their count anew."""
    async with factory(limits()) as h:
        fence = await h.begin()
        await h.finish(await h.admit(0, 2), scores=(0.5, 0.5))
        stats = await h.stats()
        assert (stats.zero_variance_since_commit, stats.groups_ready, stats.payload_bytes) == (2, 0, 0)
        await h.expect_fates(dropped_zero_variance=4)
        await h.publish(fence, 0)
        assert (await h.stats()).zero_variance_since_commit == 0
    async with factory(limits(drop_zero_variance=False)) as h:
        await h.begin()
        await h.finish(await h.admit(0, 1), scores=(0.5, 0.5))
        assert (await h.stats()).groups_ready == 1


async def cancelled_attempts_have_a_reason(factory: LedgerFactory) -> None:
    """P3: a cancelled attempt ends its slot; an unknown reason, another run or purpose never enters the books."""
    async with factory(limits()) as h:
        await h.begin()
        await h.admit(0, 1, size=3)
        stop = Submission(attempt_id=h.attempt(0, 2), outcome=Outcome.CANCELLED, reason=CancelReason.LAG)
        await h.put(stop, h.done(0, 0, 1.0, 0), h.done(0, 1, 0.0, 0))
        assert (await h.stats()).groups_ready == 1
        await h.expect_fates(in_flight=2, cancelled_lag=1)
        odd = Submission(attempt_id=h.attempt(0, 2), outcome=Outcome.CANCELLED, reason="tired")
        evaluation = AttemptId(h.run, 0, 0, 0, Purpose.EVAL)
        for submission in (
            odd,
            Submission(attempt_id=AttemptId("another", 0, 0), outcome=Outcome.FAILED),
            Submission(attempt_id=evaluation, outcome=Outcome.FAILED),
            h.done(0, 0, float("nan"), 0),
        ):
            await raises(LedgerError, h.put(submission))


async def stop_closes_the_books(factory: LedgerFactory) -> None:
    """Nothing stays in flight, in any state; what was consumed stays so."""
    async with factory(limits(max_lag=4)) as h:
        fence = await h.begin()
        await h.ready(0, 3)
        await h.admit(0, 1)
        await h.put(h.done(3, 0, 1.0, 0))
        leased = await h.ledger.lease(fence, 0, 0, 2)
        await h.publish(fence, 0, leased[:1])
        await h.ledger.stop("the user said so")
        await h.expect_fates(trained=2, dropped_stopped=5, cancelled_stopped=1)
        stats = await h.stats()
        assert (stats.groups_open, stats.groups_ready, stats.groups_leased, stats.groups_consumed) == (0, 0, 0, 1)
        assert (stats.payload_bytes, stats.stopped) == (0, True)
        assert (await h.ledger.admit(0, 2, 1, "worker")).refusal is Refusal.STOPPED
        assert await h.put(h.done(3, 1, 1.0, 0)) == [Verdict.LATE]
        assert [notice.reason for notice in await h.ledger.renew("worker", [3])] == [CancelReason.STOPPED]
        await h.expect_fates(trained=2, dropped_stopped=5, cancelled_stopped=1)


LEDGER_SUITE: dict[str, LedgerCase] = {
    case.__name__: case
    for case in (
        finished_groups_free_their_room_at_once,
        capacity_counts_batches_not_versions,
        older_versions_get_less_room,
        a_full_queue_refuses_and_evicts_nothing,
        admitted_attempts_are_never_blocked,
        admission_says_why_not,
        late_attempts_are_refused_and_counted,
        every_attempt_is_accepted_once,
        closed_groups_take_nothing_more,
        retries_are_bounded,
        a_deadline_frees_the_group,
        one_call_or_many,
        groups_without_variance_leave_at_once,
        cancelled_attempts_have_a_reason,
        stop_closes_the_books,
        *DISPATCH_CASES,
        *LEARNER_CASES,
        *LAG_CASES,
        *FENCE_CASES,
        *REPORT_CASES,
        *RESTART_CASES,
        *RECOVERY_CASES,
        *FATE_CASES,
    )
}
"""Every case, by name."""
