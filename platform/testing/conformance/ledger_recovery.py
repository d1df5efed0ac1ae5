"""The part of the ledger suite about losses: a server that comes back without its last writes, or without any (P8)."""

from msgspec.structs import replace

from headrace.platform.errors import Fenced, LedgerError, LedgerRewound
from headrace.platform.ledger.policy import EPOCH_ATTEMPTS, EPOCH_FENCES, EPOCH_REVISIONS
from headrace.platform.records.delivery import Verdict
from headrace.platform.records.status import Fate
from headrace.platform.testing.conformance.ledger_chain import chain_group, straight_chain
from headrace.platform.testing.conformance.ledger_harness import (
    LedgerCase,
    LedgerFactory,
    limits,
    numbers,
    raises,
)
from headrace.platform.testing.conformance.ledger_restart import mark, rewind, wipe


async def lost_writes_are_noticed(factory: LedgerFactory) -> None:
    """P8: one admission was forgotten: the client has seen more than the ledger has, so confirming fails."""
    async with factory(limits()) as h:
        fence = await h.begin()
        token = await mark(h)
        await h.admit(0, 1)
        await rewind(h, token)
        await raises(LedgerRewound, h.ledger.admit(0, 2, 1, "worker"))
        assert not await h.ledger.confirm(0, "content-0")
        assert (await h.stats()).suspect
        await h.ledger.reconcile(straight_chain([fence]))
        stats = await h.stats()
        assert (stats.suspect, stats.epoch, stats.dispatched, stats.head) == (False, 1, 0, 0)
        assert stats.revision > EPOCH_REVISIONS, "no revision of an earlier epoch is above this"
        tickets = await h.admit(0, 1)
        assert (tickets[0].group, tickets[0].attempts) == (0, ((0, EPOCH_ATTEMPTS), (1, EPOCH_ATTEMPTS)))
        assert await h.put(h.done(0, 0, 1.0, 0)) == [Verdict.SUPERSEDED], "the lost dispatch's episode has another id"
        await h.finish(tickets)


async def a_lost_commit_is_recovered(factory: LedgerFactory) -> None:
    """Case Q21: the server lost its last second, a commit included: the manifests have it, and nothing comes twice."""
    async with factory(limits(max_lag=4)) as h:
        fence = await h.begin()
        await h.ready(0, 3)
        leased = await h.ledger.lease(fence, 0, 0, 2)
        token = await mark(h)
        await h.publish(fence, 0, leased)
        await rewind(h, token)
        consumed = [chain_group(group, 1) for group in leased]
        await h.ledger.reconcile(straight_chain([fence, fence], consumed=consumed))
        await h.expect_fates(trained=4, in_flight=2)
        stats = await h.stats()
        assert (stats.head, stats.head_batches, stats.groups_consumed, stats.groups_ready) == (1, 1, 2, 1)
        assert (stats.lags, stats.payload_bytes) == ({0: 4}, sum(len(m.payload) for m in leased[0].members))
        await raises(Fenced, h.ledger.stage(fence))
        again = h.request(fence, 1, 0, leased)
        await h.ledger.commit(again)  # P7: whose reply was lost, whatever else was
        fence = await h.ledger.acquire_learner("second")
        assert fence == EPOCH_FENCES + 1
        assert numbers(await h.ledger.lease(fence, 1, 0, 1)) == [2]
        await h.ledger.rollback(fence, 0)
        assert numbers(await h.ledger.lease(fence, 0, 0, 3)) == [0, 1, 2], "it was published, not settled (Q1)"
        assert await h.ledger.stage(fence) == 2, "a number is never used twice (P6)"


async def lost_settling_is_recovered(factory: LedgerFactory) -> None:
    """P5, P8: what a complete checkpoint settled is final, whatever the ledger remembers; later versions are not."""
    async with factory(limits(max_lag=4, batch_groups=1)) as h:
        fence = await h.begin()
        await h.ready(0, 3)
        token = await mark(h)
        leased = await h.ledger.lease(fence, 0, 0, 2)
        for parent in range(2):
            await h.publish(fence, parent, leased[parent : parent + 1])
        await rewind(h, token)
        consumed = [chain_group(leased[0], 1), chain_group(leased[1], 2)]
        await h.ledger.reconcile(straight_chain([fence] * 3, settled=1, consumed=consumed))
        await h.expect_fates(trained=4, in_flight=2)
        assert (await h.stats()).groups_consumed == 1
        assert await h.put(h.done(0, 0, 1.0, 0)) == [Verdict.LATE]
        assert await h.put(h.done(1, 0, 0.0, 0)) == [Verdict.DUPLICATE]
        fence = await h.ledger.acquire_learner("second")
        await h.ledger.rollback(fence, 1)
        assert numbers(await h.ledger.lease(fence, 1, 0, 2)) == [1, 2]


async def lost_puts_and_retries_are_accounted_for(factory: LedgerFactory) -> None:
    """P3: the chain names a third attempt where the ledger has the first one running; what it does not name is over."""
    async with factory(limits(max_lag=4, max_attempts=3)) as h:
        fence = await h.begin()
        await h.admit(0, 1, size=4)
        token = await mark(h)
        await h.put(h.failed(0, 0), h.failed(0, 0, 1), h.done(0, 0, 1.0, 0, attempt=2), h.done(0, 1, 0.0, 0))
        await h.put(h.failed(0, 2, retryable=False), h.failed(0, 3, retryable=False))
        leased = await h.ledger.lease(fence, 0, 0, 1)
        await h.publish(fence, 0, leased)
        before = await h.stats()
        await rewind(h, token)
        await h.ledger.reconcile(straight_chain([fence, fence], consumed=[chain_group(leased[0], 1)]))
        await h.expect_fates(trained=2, failed_infrastructure=4)
        stats = await h.stats()
        assert (stats.dispatched, stats.fates) == (before.dispatched, before.fates)
        assert (stats.score_sum, stats.score_count) == (before.score_sum, before.score_count)
        rows, _ = await h.ledger.fates(0, 100)
        assert [(row.episode_id, row.fate) for row in rows] == [
            *((str(h.attempt(0, 0, attempt)), Fate.FAILED) for attempt in (0, 1)),
            *((str(h.attempt(0, sample, attempt)), Fate.TRAINED) for sample, attempt in ((0, 2), (1, 0))),
            *((str(h.attempt(0, sample)), Fate.FAILED) for sample in (2, 3)),
        ]
        assert await h.put(h.done(0, 0, 1.0, 0, attempt=2), h.done(0, 0, 1.0, 0)) == [
            Verdict.DUPLICATE,
            Verdict.SUPERSEDED,
        ]


async def lost_dispatches_are_accounted_for(factory: LedgerFactory) -> None:
    """P3, P10: group 1 was dispatched, trained and forgotten; group 0 before it as well, and nobody knows its end."""
    async with factory(limits(max_lag=4)) as h:
        fence = await h.begin()
        token = await mark(h)
        await h.admit(0, 1)
        await h.ready(0, 1)
        leased = await h.ledger.lease(fence, 0, 0, 1)
        await h.publish(fence, 0, leased)
        await rewind(h, token)
        await h.ledger.reconcile(straight_chain([fence, fence], consumed=[chain_group(leased[0], 1)]))
        await h.expect_fates(trained=2, failed_infrastructure=2)
        rows, _ = await h.ledger.fates(0, 100)
        assert [row.fate for row in rows] == [Fate.TRAINED] * 2 + [Fate.FAILED] * 2
        assert await h.put(h.done(0, 0, 1.0, 0)) == [Verdict.LATE]
        assert await h.put(h.done(1, 0, 0.0, 0)) == [Verdict.DUPLICATE]
        assert (await h.admit(1, 1))[0].group == 2


async def a_number_given_out_twice_is_two_dispatches(factory: LedgerFactory) -> None:
    """P1, P8: group 0 is dispatched again in the next epoch and trained; then an older copy of the server comes back,
    where its first dispatch is still being played: nothing lay between the attempts of the two."""
    async with factory(limits(max_lag=4)) as h:
        fence = await h.begin()
        empty = await mark(h)
        await h.admit(0, 1)
        older = await mark(h)
        await rewind(h, empty)
        await h.ledger.reconcile(straight_chain([fence]))
        await h.ready(0, 1)
        fence = await h.ledger.acquire_learner("second")
        leased = await h.ledger.lease(fence, 0, 0, 1)
        await h.publish(fence, 0, leased)
        await rewind(h, older)
        await h.ledger.reconcile(straight_chain([1, fence], epoch=2, consumed=[chain_group(leased[0], 1)]))
        await h.expect_fates(trained=2, failed_infrastructure=2)


async def a_manifest_without_its_commit_counts(factory: LedgerFactory) -> None:
    """P3, P8: the learner died between the two; the next one dropped a member, and was lost before its own manifest.
    The chain is the truth: the member was trained, and is counted once."""
    async with factory(limits(max_lag=1)) as h:
        fence = await h.begin()
        await h.admit(0, 1, size=3)
        version = await h.publish(fence, 0)
        await h.put(*(h.done(0, sample, float(sample), min(sample, version)) for sample in range(3)))
        leased = await h.ledger.lease(fence, version, 0, 1)
        fence = await h.ledger.acquire_learner("second", takeover=True)
        again = await h.ledger.lease(fence, version, 1, 1)
        assert (len(leased[0].members), len(again[0].members)) == (3, 2)
        await h.expect_fates(in_flight=2, dropped_lag=1)
        consumed = [chain_group(leased[0], 2)]
        await h.ledger.reconcile(straight_chain([1, 1, 1], consumed=consumed))
        await h.expect_fates(trained=3)
        assert (await h.stats()).score_count == 3
        rows, _ = await h.ledger.fates(0, 10)
        assert [row.fate for row in rows] == [Fate.DROPPED, Fate.IN_FLIGHT, *[Fate.TRAINED] * 3]
        twice = [*consumed, replace(consumed[0], consumed_by=1)]
        await h.ledger.reconcile(straight_chain([1, 1, 1], epoch=2, consumed=twice))
        await h.expect_fates(trained=3)
        fence = await h.ledger.acquire_learner("third")
        await h.ledger.rollback(fence, 1)
        assert len((await h.ledger.lease(fence, 1, 0, 1))[0].members) == 3, "version 2 had it, and version 1 had not"


async def lost_rollbacks_are_recovered(factory: LedgerFactory) -> None:
    """P6, P8: the chain went on from version 0, so what version 1 consumed comes again, if no later one has it."""
    async with factory(limits(max_lag=4, batch_groups=1)) as h:
        fence = await h.begin()
        await h.ready(0, 2)
        leased = await h.ledger.lease(fence, 0, 0, 2)
        await h.publish(fence, 0, leased)
        token = await mark(h)
        await h.ledger.rollback(fence, 0)
        again = await h.ledger.lease(fence, 0, 0, 1)
        await h.publish(fence, 0, again)
        await rewind(h, token)
        chain = straight_chain([fence] * 3, consumed=[chain_group(again[0], 2)])
        forked = replace(chain.versions[2], parent=0, batches=1)
        await h.ledger.reconcile(replace(chain, versions=(*chain.versions[:2], forked)))
        await h.expect_fates(trained=2, in_flight=2)
        stats = await h.stats()
        assert (stats.head, stats.head_batches, stats.lags) == (2, 1, {0: 2})
        fence = await h.ledger.acquire_learner("second")
        assert numbers(await h.ledger.lease(fence, 2, 0, 1)) == [1]


async def an_empty_server_is_rebuilt(factory: LedgerFactory) -> None:
    """Case Q21, P8: everything is gone: lineage, numbers, counts and unsettled consumption come from the run root."""
    async with factory(limits(max_lag=4, batch_groups=1)) as h:
        fence = await h.begin()
        await h.ready(0, 3)
        leased = await h.ledger.lease(fence, 0, 0, 2)
        await h.publish(fence, 0, leased[:1])
        await h.ledger.settle(fence, 1)
        await h.publish(fence, 1, leased[1:])
        await wipe(h)
        await raises(LedgerRewound, h.ledger.stage(fence))
        assert not await h.ledger.confirm(2, "content-2")
        assert not await h.ledger.confirm(-1, "")
        fates = {"trained": 4, "failed:infrastructure": 2}
        consumed = [chain_group(leased[1], 2)]
        await h.ledger.reconcile(straight_chain([fence] * 3, settled=1, consumed=consumed, sequence=5, fates=fates))
        await h.expect_fates(trained=4, failed_infrastructure=2)
        stats = await h.stats()
        assert (stats.head, stats.dispatch_sequence, stats.groups_consumed, stats.lags) == (2, 5, 1, {0: 2})
        assert await h.put(h.done(0, 0, 0.0, 0), h.done(2, 0, 0.0, 0)) == [Verdict.LATE] * 2
        assert await h.put(h.done(1, 0, 0.0, 0)) == [Verdict.DUPLICATE]
        fence = await h.ledger.acquire_learner("second")
        assert await h.ledger.stage(fence) == 3
        await h.ledger.rollback(fence, 1)
        await h.expect_fates(trained=2, in_flight=2, failed_infrastructure=2)
        again = await h.ledger.lease(fence, 1, 0, 1)
        assert [(member.payload, member.store_file) for member in again[0].members] == [(b"", "episodes/1.parquet")] * 2
        assert (again[0].group, again[0].position, again[0].version) == (1, 1, 0)
        assert (await h.admit(1, 1))[0].group == 5


async def an_empty_run_is_rebuilt(factory: LedgerFactory) -> None:
    """P8: a server that was lost before the first version leaves an empty chain; the run begins."""
    async with factory(limits()) as h:
        await h.ledger.acquire_learner("first")
        await wipe(h)
        assert not await h.ledger.confirm(-1, "")
        await h.ledger.reconcile(straight_chain([]))
        assert (await h.stats()).head is None
        await h.begin()
        await h.ready(0, 1)


async def later_epochs_win(factory: LedgerFactory) -> None:
    """P8: whoever reconciles late, with an older epoch, changes nothing; the same chain twice changes nothing more."""
    async with factory(limits(max_lag=4)) as h:
        fence = await h.begin()
        await h.ready(0, 2)
        leased = await h.ledger.lease(fence, 0, 0, 1)
        await h.publish(fence, 0, leased)
        consumed = [chain_group(group, 1) for group in leased]
        await h.ledger.reconcile(straight_chain([fence, fence], epoch=2, consumed=consumed))
        await raises(LedgerError, h.ledger.reconcile(straight_chain([fence], epoch=2)))
        await raises(LedgerError, h.ledger.reconcile(straight_chain([fence], epoch=1)))
        await h.ledger.reconcile(straight_chain([fence, fence], epoch=3, settled=1, consumed=consumed))
        await h.ledger.reconcile(straight_chain([fence, fence], epoch=4, settled=1, consumed=consumed))
        await h.expect_fates(trained=2, in_flight=2)
        stats = await h.stats()
        assert (stats.epoch, stats.head, stats.groups_consumed, stats.groups_ready) == (4, 1, 0, 1)
        assert (stats.learner, stats.fence) == ("", 4 * EPOCH_FENCES)


async def a_stopped_run_stays_stopped(factory: LedgerFactory) -> None:
    """P8: nothing is in flight after a stop, not even what a version off the lineage had consumed."""
    async with factory(limits(max_lag=4)) as h:
        fence = await h.begin()
        await h.ready(0, 1)
        await h.publish(fence, 0, await h.ledger.lease(fence, 0, 0, 1))
        await h.ledger.stop("end")
        await h.ledger.reconcile(straight_chain([fence]))
        await h.expect_fates(dropped_stopped=2)
        stats = await h.stats()
        assert (stats.stopped, stats.head) == (True, 0)


async def running_groups_survive_a_loss(factory: LedgerFactory) -> None:
    """P8, P12: what the chain does not know goes on as the ledger has it, under fresh leases."""
    async with factory(limits(dispatch_lease_s=10.0)) as h:
        fence = await h.begin()
        await h.ready(0, 1)
        await h.admit(0, 1, holder="one")
        await h.ledger.lease(fence, 0, 0, 1)
        await h.advance(9.0)
        token = await mark(h)
        await h.ledger.stage(fence)
        await rewind(h, token)
        await h.advance(9.0)
        await h.ledger.reconcile(straight_chain([fence]))
        stats = await h.stats()
        assert (stats.groups_open, stats.groups_waiting, stats.groups_ready, stats.groups_leased) == (1, 0, 1, 0)
        assert await h.put(h.done(1, 0, 1.0, 0), h.done(1, 1, 0.0, 0)) == [Verdict.ACCEPTED] * 2


RECOVERY_CASES: tuple[LedgerCase, ...] = (
    lost_writes_are_noticed,
    a_lost_commit_is_recovered,
    lost_settling_is_recovered,
    lost_puts_and_retries_are_accounted_for,
    lost_dispatches_are_accounted_for,
    a_number_given_out_twice_is_two_dispatches,
    a_manifest_without_its_commit_counts,
    lost_rollbacks_are_recovered,
    an_empty_server_is_rebuilt,
    an_empty_run_is_rebuilt,
    later_epochs_win,
    a_stopped_run_stays_stopped,
    running_groups_survive_a_loss,
)
"""Part of `LEDGER_SUITE`."""
