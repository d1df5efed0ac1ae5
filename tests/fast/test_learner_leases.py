"""Who holds the run, for how long a learner keeps what it leased, and what a bad step costs (P2, P3, P7, P12, P13)."""

import asyncio

import pytest
from learner_kit import RUN, World

from headrace.platform.errors import CommitRefused, DeadlineExceeded, Fenced, LedgerAway, LedgerRewound, RunFailed
from headrace.platform.ledger.patient import PatientLedger
from headrace.platform.testing.fakes.learning import FakeAlgorithm, FakeBackend
from headrace.trainer.heartbeat import Heartbeat
from headrace.trainer.ranks import step_digest


async def test_a_learner_whose_run_was_stopped_is_fenced(tmp_path):
    """The next step learns of it at once."""
    world = World(tmp_path)
    learner = world.learner()
    await learner.start()
    await world.ledger.stop("enough")
    with pytest.raises(Fenced, match="stopped"):
        await learner.step()


async def test_closing_after_a_stop_only_logs(tmp_path, caplog):
    """The stop dropped what the learner held, so that its release is refused and nothing comes back."""
    world = World(tmp_path, publish_every=2)
    learner = world.learner()
    await learner.start()
    await world.play(2, version=0)
    await learner.step()
    assert (await world.ledger.stats()).groups_leased == 2
    await world.ledger.stop("enough")
    await learner.close()
    assert "could not release groups [0, 1]" in caplog.text
    stats = await world.ledger.stats()
    assert (stats.fates["dropped:stopped"], stats.fates["in_flight"], stats.holds) == (4, 0, True)


async def test_a_learner_that_lost_the_run_is_fenced(tmp_path):
    """case Q18: another learner takes over while the old one computes; the old one cannot commit any more."""
    world = World(tmp_path)
    loop = asyncio.get_running_loop()
    new = world.learner()

    class Overtaken(FakeBackend):
        def step(self, batch, algorithm):
            asyncio.run_coroutine_threadsafe(new.start(takeover=True), loop).result()
            return super().step(batch, algorithm)

    old = world.learner(Overtaken(), inline=False)
    await old.start()
    await world.play(2, version=0)
    with pytest.raises(Fenced):
        await old.step()
    await old.close()
    stats = await world.ledger.stats()
    assert (stats.head, stats.fence, stats.groups_ready, stats.holds) == (0, 2, 2, True)
    assert (await new.step()).version == 1
    assert (await world.ledger.stats()).fates == {"trained": 4, "in_flight": 0}
    with pytest.raises(Fenced):
        await old.step()


async def test_leases_are_extended_while_a_step_computes(tmp_path):
    """A step that outlasts the lease twice over still commits."""
    world = World(tmp_path, queue={"learner_term_s": 3e-3}, limits={"learner_lease_s": 10.0})
    loop = asyncio.get_running_loop()

    extended = asyncio.Event()
    extend = world.ledger.extend

    async def recorded(fence, groups):
        await extend(fence, groups)
        extended.set()

    async def six_seconds_and_a_renewal():
        extended.clear()
        world.clock.now_s += 6.0
        await extended.wait()

    class Slow(FakeBackend):
        def step(self, batch, algorithm):
            for _ in range(4):
                asyncio.run_coroutine_threadsafe(six_seconds_and_a_renewal(), loop).result()
            return super().step(batch, algorithm)

    world.ledger.extend = recorded
    learner = world.learner(Slow(), inline=False)
    await learner.start()
    await world.play(2, version=0)
    assert (await learner.step()).version == 1
    await learner.close()


async def test_leases_are_renewed_between_steps_that_publish_nothing(tmp_path):
    world = World(tmp_path, publish_every=3, limits={"learner_lease_s": 10.0})
    learner = world.learner()
    await learner.start()
    for _ in range(3):
        await world.play(2, version=0)
        await learner.step()
        world.clock.now_s += 6.0
    assert (await world.ledger.stats()).fates == {"trained": 12, "in_flight": 0}


async def test_a_group_whose_lease_ran_out_is_not_trained_again(tmp_path):
    """P1: it went back to the queue, and the same learner leases it once more."""
    world = World(tmp_path, publish_every=2, limits={"learner_lease_s": 10.0})
    learner = world.learner()
    await learner.start()
    await world.play(2, version=0)
    await learner.step()
    world.clock.now_s += 11.0
    with pytest.raises(CommitRefused, match=r"leases of groups \[0, 1\] ran out"):
        await learner.step()
    assert world.receipts == []
    heir = world.learner()  # P6: from the checkpoint of version 0, in the same run
    await heir.start(takeover=True)
    assert [(await heir.step()).groups, heir.held] == [2, [0, 1]]


async def test_leases_that_run_out_within_a_step_refuse_its_commit(tmp_path):
    """P7: the learner was stopped for longer than its leases, and nobody else has taken the run."""
    world = World(tmp_path, limits={"learner_lease_s": 10.0})

    class Frozen(FakeBackend):
        def step(self, batch, algorithm):
            world.clock.now_s += 11.0
            return super().step(batch, algorithm)

    learner = world.learner(Frozen())
    await learner.start()
    await world.play(2, version=0)
    with pytest.raises(CommitRefused, match=r"version 1 was not accepted: group 0 is not leased"):
        await learner.step()
    heir = world.learner()
    await heir.start(takeover=True)
    report = await heir.step()
    assert (report.step, report.version) == (1, 2)
    assert (await world.ledger.stats()).fates == {"trained": 4, "in_flight": 0}


async def test_close_gives_back_what_was_not_published(tmp_path):
    world = World(tmp_path, publish_every=2)
    learner = world.learner()
    await learner.start()
    await world.play(2, version=0)
    await learner.step()
    await learner.close()
    await learner.close()
    stats = await world.ledger.stats()
    assert (stats.groups_leased, stats.groups_ready) == (0, 2)
    assert stats.holds


# --- who is the learner (P7, P12) -------------------------------------------------------------------------------------


async def test_a_second_learner_by_mistake_is_told_who_holds_the_run(tmp_path):
    """case Q18: and nothing of the first one is lost by it."""
    world = World(tmp_path)
    first, second = world.learner(), world.learner()
    await first.start()
    await world.play(2, version=0)
    with pytest.raises(Fenced, match=r"held by learner.*pid"):
        await second.start()
    assert first.holder != second.holder
    assert (await first.step()).version == 1


async def test_a_learner_that_has_been_silent_for_a_term_may_be_followed(tmp_path):
    """P12: no `takeover` is needed then."""
    world = World(tmp_path, queue={"learner_term_s": 15.0}, limits={"learner_term_s": 15.0})
    await world.learner().start()
    world.clock.now_s += 16.0
    heir = world.learner()
    assert await heir.start() == 0
    assert (await world.ledger.stats()).learner == heir.holder


async def test_the_heartbeat_is_heard_between_steps_and_ends_with_the_learner(tmp_path):
    """P12: without a group in hand, and for as long as the driver does something else."""
    world = World(tmp_path, queue={"learner_term_s": 3e-3})
    learner, heard = world.learner(), asyncio.Event()
    extend = world.ledger.extend

    async def recorded(fence, groups):
        await extend(fence, groups)
        heard.set()

    world.ledger.extend = recorded
    await learner.start()
    await asyncio.wait_for(heard.wait(), 10)
    world.clock.now_s += 10.0
    heard.clear()
    await asyncio.wait_for(heard.wait(), 10)
    assert (await world.ledger.stats()).learner_silent_s < 1.0
    await learner.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_the_heartbeat_of_a_fenced_learner_ends_by_itself(tmp_path, caplog):
    world = World(tmp_path, queue={"learner_term_s": 3e-3})
    ended = asyncio.Event()

    async def fenced(fence, groups):
        ended.set()
        raise Fenced("another learner holds the run")

    world.ledger.extend = fenced
    heartbeat = Heartbeat(world.ledger, lambda: (), 1e-3)
    heartbeat.start(1)
    await asyncio.wait_for(ended.wait(), 10)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert "heartbeat ended: another learner holds the run" in caplog.text


@pytest.mark.parametrize("error", [LedgerAway, DeadlineExceeded])
async def test_the_heartbeat_survives_a_server_that_is_away(tmp_path, error):
    """P8: what comes after, the lease or the commit, says whether anything was lost by it."""
    world = World(tmp_path)
    beats: asyncio.Queue[int] = asyncio.Queue()

    async def away(fence, groups):
        beats.put_nowait(fence)
        raise error("no answer")

    world.ledger.extend = away
    heartbeat = Heartbeat(world.ledger, lambda: (3,), 1e-3)
    heartbeat.start(7)
    assert [await asyncio.wait_for(beats.get(), 10) for _ in range(3)] == [7, 7, 7]
    await heartbeat.stop()


# --- the server is away (P8) ------------------------------------------------------------------------------------------


async def test_a_lost_lease_reply_is_made_good(tmp_path):
    """P7: the ledger leased two groups and the reply was lost; they are leased again, and delivered once."""
    world = World(tmp_path)
    lease, lost = world.ledger.lease, []

    async def first_reply_lost(*arguments):
        groups = await lease(*arguments)
        if groups and not lost:
            lost.extend(group.group for group in groups)
            raise LedgerAway("connection reset")
        return groups

    world.ledger.lease = first_reply_lost
    learner = world.learner(ledger=PatientLedger(world.ledger, 5.0, lambda text: None, held=lambda: learner.held))
    await learner.start()
    await world.play(3, version=0)
    report = await learner.step()
    assert (lost, report.groups) == ([0, 1], 2)
    stats = await world.ledger.stats()
    assert (stats.groups_consumed, stats.groups_ready, stats.groups_leased) == (2, 1, 0)
    assert (await world.registry.manifests())[-1].episode_files == ("episodes/g0.parquet", "episodes/g1.parquet")


@pytest.mark.parametrize("error", [LedgerAway, LedgerRewound, DeadlineExceeded])
async def test_a_server_that_stays_away_ends_the_step_by_name(tmp_path, error):
    """P8: what the patience ends with is the run's cause."""
    world = World(tmp_path)

    async def away(*arguments):
        raise error("connection refused; waited 60.0 s for the ledger")

    learner = world.learner()
    await learner.start()
    world.ledger.lease = away
    with pytest.raises(RunFailed, match="learner step 1: the ledger's server stayed away: connection refused; waited"):
        await learner.step()


# --- bad steps, poison and ranks (P3, P13) ----------------------------------------------------------------------------


async def test_a_group_that_kills_the_learner_each_time_is_dropped_as_poison(tmp_path):
    """P3, case Q24: an error that nobody catches stands for the death of the process."""
    world = World(tmp_path, batch_groups=1, limits={"max_deliveries": 3})

    class DiesOfGroup0(FakeBackend):
        def step(self, batch, algorithm):
            if any(".t0." in sample.episode_id for sample in batch):
                raise SystemError("segmentation fault")
            return super().step(batch, algorithm)

    await world.learner(DiesOfGroup0()).start()
    await world.play(2, version=0)
    for _ in range(3):
        learner = world.learner(DiesOfGroup0())
        await learner.start(takeover=True)
        with pytest.raises(SystemError):
            await learner.step()
    survivor = world.learner(DiesOfGroup0())
    await survivor.start(takeover=True)
    report = await survivor.step()
    assert report.groups == 1
    stats = await world.ledger.stats()
    assert (stats.fates["dropped:poison"], stats.fates["trained"], stats.holds) == (2, 2, True)


async def test_a_step_that_is_never_finite_ends_as_poison_too(tmp_path):
    """P3: the run ends by name each time, and the delivery counts although the leases were given back."""

    class NotANumber(FakeAlgorithm):
        def advantages(self, group):
            bad = group[0].episode.dispatch_sequence == 0
            return [[float("nan") if bad else 1.0] * 2 for _ in group]

    world = World(tmp_path, batch_groups=1, limits={"max_deliveries": 2})
    await world.learner().start()
    await world.play(2, version=0)
    for _ in range(2):
        learner = world.learner(algorithm=NotANumber())
        await learner.start(takeover=True)
        with pytest.raises(RunFailed, match=r"not finite.*test-run\.t0\.0\.0"):
            await learner.step()
        await learner.close()
        assert (await world.ledger.stats()).groups_ready == 2
    last = world.learner(algorithm=NotANumber())
    await last.start(takeover=True)
    assert (await last.step()).groups == 1
    assert (await world.ledger.stats()).fates["dropped:poison"] == 2


@pytest.mark.parametrize("lost", [False, True])
async def test_ranks_that_do_not_agree_cost_the_step_and_nothing_else(tmp_path, lost):
    """P13: the leases are given back, and the weights and the head are as before."""

    def gather(digest):
        if lost:
            raise RuntimeError("rank 1 is gone")
        return [digest, "another digest"]

    world, backend = World(tmp_path, publish_every=2), FakeBackend()
    learner = world.learner(backend, gather=gather)
    await learner.start()
    await world.play(2, version=0)
    with pytest.raises(RunFailed, match="a learner rank is lost" if lost else r"learner ranks \[1\]"):
        await learner.step()
    assert (backend.calls, learner.held, learner.steps) == ([], [], 0)
    stats = await world.ledger.stats()
    assert (stats.groups_ready, stats.groups_leased, stats.head) == (2, 0, 0)


async def test_every_step_is_agreed_on_before_it_is_taken(tmp_path):
    """P13: the digest is that of the batch, the head and the step."""
    world, backend, told = World(tmp_path), FakeBackend(), []

    def gather(digest):
        told.append((digest, len(backend.calls)))
        return [digest, digest]

    learner = world.learner(backend, gather=gather)
    await learner.start()
    await world.play(4, version=0)
    for _ in range(2):
        await learner.step()
    ids = [[f"{RUN}.t{group}.{sample}.0" for group in pair for sample in (0, 1)] for pair in ((0, 1), (2, 3))]
    assert told == [(step_digest(ids[0], 0, 1), 0), (step_digest(ids[1], 1, 2), 1)]
