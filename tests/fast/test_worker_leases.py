"""The worker's dispatch leases: it plays what it holds, as it was begun, and nothing that it has lost (P2, P12)."""

import asyncio
import time

import pytest
from episode_kit import DONE, World, ends, never, says
from worker_kit import RUN, SIZE, Bench, no_task_left

from headrace.platform.config.tasks import CurriculumConfig
from headrace.platform.ledger.memory import MemoryLedger
from headrace.platform.records import Status
from headrace.platform.records.delivery import Outcome

EXHAUSTED = {"group_deadline_s": 1e9}


class Deaf(MemoryLedger):
    """Keeps what it was told. Its renewals are answered only while `answers` is set."""

    def __init__(self, *args):
        super().__init__(*args)
        self.answers = asyncio.Event()
        self.answers.set()
        self.renewals, self.holders, self.cancelled = [], set(), []

    async def admit(self, version, size, groups, holder):
        self.holders.add(holder)
        return await super().admit(version, size, groups, holder)

    async def renew(self, holder, groups):
        self.renewals.append(list(groups))
        await self.answers.wait()
        return await super().renew(holder, groups)

    async def put(self, submissions):
        self.cancelled += [each.reason for each in submissions if each.outcome is Outcome.CANCELLED]
        return await super().put(submissions)


@pytest.fixture
def bench(tmp_path, monkeypatch):
    def make(world=lambda n: World(), **options):
        return Bench(tmp_path, monkeypatch, world, **{"ledger": Deaf, "limits": EXHAUSTED, **options})

    return make


@pytest.fixture(autouse=True)
async def nothing_is_left_running():
    before = asyncio.all_tasks()
    yield
    await asyncio.sleep(0)
    assert not no_task_left(before)


async def stop(b):
    await b.worker.stop()
    return await b.check_closed()


async def adopted(b, done=0):
    """A group of which another worker played `done` members before it died."""
    await b.publish()
    old = b.another()
    (ticket,) = (await b.ledger.admit(0, SIZE, 1, old.holder)).tickets
    attempts = old._open(ticket, 0.0)
    for attempt_id in attempts[:done]:
        await old._deliver([await old._play_present(attempt_id)])
    await b.ledger.disown(old.holder)


async def test_a_worker_has_a_name_that_no_process_had_before(bench):
    b = bench()
    names = {b.worker.holder, b.another().holder, b.another().holder}
    assert len(names) == 3
    assert {name.rsplit("/", 1)[0] for name in names} == {"rollout-0"}
    await b.publish()
    await b.worker.play_round(1)
    assert b.ledger.holders == {b.worker.holder}


async def test_leases_are_renewed_as_long_as_episodes_are_played(bench):
    """The server's clock passes many leases."""
    free = asyncio.Event()

    async def step(message):
        await free.wait()
        return ends(1.0)

    b = bench(lambda n: World(step))
    await b.publish()
    await b.worker.start()
    await b.until(lambda stats: stats.groups_open == 2)
    for _ in range(5):
        b.clock += 14.0
        known = len(b.ledger.renewals)
        await b.comes(lambda known=known: len(b.ledger.renewals) > known + 1)
    free.set()
    await b.until(lambda stats: stats.groups_ready == 4)
    assert b.ledger.renewals[0] == [0, 1]
    stats = await stop(b)
    assert "failed:infrastructure" not in stats.fates
    assert stats.refused == {}


async def test_a_round_in_lock_step_renews_too(bench):
    free = asyncio.Event()

    async def step(message):
        await free.wait()
        return ends(1.0)

    b = bench(lambda n: World(step))
    await b.publish()
    playing = asyncio.create_task(b.worker.play_round(1))
    for _ in range(3):
        b.clock += 14.0
        known = len(b.ledger.renewals)
        await b.comes(lambda known=known: len(b.ledger.renewals) > known + 1)
    free.set()
    assert await playing == 1
    assert (await b.ledger.stats()).groups_ready == 1


# case Q10
async def test_a_group_that_another_plays_ends_here_and_its_late_results_are_refused(bench):
    """P2: whoever is superseded says nothing in the books; what it had finished is refused and counted."""
    free = asyncio.Event()

    async def step(message):
        await free.wait()
        return ends(1.0)

    b = bench(lambda n: World(never if n % SIZE else step), max_episodes=SIZE)
    b.worker._newest_version = lambda: 0 if not b.ledger.holders else None
    await b.publish()
    await b.worker.start()
    await b.until(lambda stats: stats.groups_open == 1)
    b.ledger.answers.clear()
    await b.comes(lambda: b.ledger.renewals)
    await b.ledger.disown(b.worker.holder)
    (ticket,) = (await b.ledger.admit(0, SIZE, 1, "another")).tickets
    assert (ticket.group, ticket.attempts) == (0, tuple((n, 1) for n in range(SIZE)))
    free.set()
    await b.comes(lambda: b.ledger._books.refused)
    assert (await b.ledger.stats()).refused == {"superseded": 1}
    b.ledger.answers.set()
    await b.comes(lambda: not b.worker.stats().running)
    assert b.ledger.cancelled == []
    assert b.engine.sessions(0) == 0
    assert all(world.closed for world in b.used)
    await b.worker.stop()
    assert (await b.ledger.stats()).groups_open == 1, "the other one goes on"


# P12
async def test_whoever_hears_nothing_for_a_whole_lease_samples_no_further(bench):
    """The server does not answer at all: the worker neither waits for it, nor tries to tell it."""
    b = bench(lambda n: World(never), max_episodes=SIZE)
    b.worker._newest_version = lambda: 0 if not b.ledger.holders else None
    passed_s = 0.0
    b.worker._leases._clock = lambda: time.monotonic() + passed_s
    await b.publish()
    await b.worker.start()
    await b.until(lambda stats: stats.groups_open == 1)
    for _ in range(3):
        passed_s += 10.0
        known = len(b.ledger.renewals)
        await b.comes(lambda known=known: len(b.ledger.renewals) > known + 1)
    assert b.worker.stats().running == SIZE, "two leases long it was heard"
    b.ledger.answers.clear()
    passed_s += 16.0
    await b.comes(lambda: not b.worker.stats().running)
    assert b.engine.sessions(0) == 0
    assert all(world.closed for world in b.used)
    assert b.worker._attempts.places == 0
    asked = len(b.ledger.renewals)
    b.ledger.answers.set()
    await b.worker._leases.renew()
    assert len(b.ledger.renewals) == asked, "a lease that was given up is not renewed"
    b.clock += 16.0
    assert (await b.ledger.stats()).groups_waiting == 1
    await b.worker.stop()
    assert b.ledger.cancelled == []


async def test_a_group_that_was_lost_and_given_out_again_to_the_same_worker_is_played_anew(bench):
    b = bench(lambda n: World(never if n < SIZE else None), max_episodes=2 * SIZE)
    await b.publish()
    await b.worker.start()
    await b.until(lambda stats: stats.groups_open == 2)
    b.ledger.answers.clear()
    await b.comes(lambda: b.ledger.renewals)
    b.clock += 16.0  # the ledger's clock says that all leases are over, and the worker has room
    await b.until(lambda stats: stats.groups_ready >= 2)
    b.ledger.answers.set()
    stats = await stop(b)
    assert stats.holds
    tries = {each.attempt_id.attempt for each in b.store.iterate() if each.attempt_id.group == 0}
    assert tries == {1}


# P18
@pytest.mark.parametrize("done", [0, 3])
async def test_the_rest_of_a_dead_workers_group_is_played_with_its_version_and_task(bench, done):
    b = bench(engine=says(DONE, versions=(0, 1)))
    await adopted(b, done)
    await b.publish()
    assert await b.worker.play_round(1) == 1
    stats = await b.ledger.stats()
    assert (stats.groups_ready, stats.fates["failed:infrastructure"]) == (1, SIZE - done)
    episodes = sorted(b.store.iterate(), key=lambda each: each.attempt_id)
    assert [(each.attempt_id.sample, each.attempt_id.attempt) for each in episodes] == [
        (n, 0 if n < done else 1) for n in range(SIZE)
    ]
    assert len({(each.task.task_id, each.seed, each.version.number) for each in episodes}) == 1
    assert episodes[0].version.number == 0, "not the newest one"
    assert stats.holds


# P23
async def test_an_adopted_group_whose_version_is_gone_fails_as_any_does(bench):
    b = bench(engine=says(DONE, versions=(0,)))
    await adopted(b, 0)
    await b.publish()
    b.worker._player._generator = says(DONE, versions=(1,))
    b.worker._newest_version = lambda: 1
    await b.worker.play_round(1)
    assert b.worker.stats().statuses == {Status.ENV_TRANSIENT: 2 * SIZE}
    stats = await b.check_closed()
    assert stats.fates["failed:infrastructure"] == 3 * SIZE


@pytest.mark.parametrize("done", [0, 2])
async def test_under_a_curriculum_the_rest_of_a_group_is_not_mixed_with_what_was_played_before(bench, done):
    """P1: the members of a group share their task, and a curriculum's choice depends on what it was told since."""
    b = bench()
    await adopted(b, done)
    b.worker._worlds.curriculum = b.worker._worlds._curriculum(CurriculumConfig(kind="success_window"))
    await b.worker.start()
    await b.until(lambda stats: stats.groups_open == 0 and stats.groups_ready >= 1)
    stats = await stop(b)
    again = [each for each in b.store.iterate() if each.attempt_id.group == 0 and each.attempt_id.attempt == 1]
    assert len(again) == (0 if done else SIZE)
    assert stats.fates.get("cancelled:superseded", 0) == (SIZE - done if done else 0)


# P16
async def test_a_task_that_was_lost_to_lag_is_played_again_under_a_new_number(bench):
    b = bench(limits={**EXHAUSTED, "lag_restarts": 2, "max_lag": 0}, engine=says(DONE, versions=(0,)))
    await b.publish()
    (ticket,) = (await b.ledger.admit(0, SIZE, 1, "another")).tickets
    await b.publish()
    assert [notice.reason for notice in await b.ledger.renew("another", [0])] == ["lag"]
    attempts = b.worker._open(ticket, 0.0)
    group = b.worker._attempts.group_of(attempts[0])
    for attempt_id in attempts:
        b.worker._attempts.spawn(attempt_id)
    b.worker._attempts.cancel(group, "lag")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    b.worker._finished.put_nowait(None)
    await b.worker._delivery_loop()
    assert (await b.ledger.stats()).restarts_waiting == 1
    b.worker._player._generator = says(DONE, versions=(1,))
    b.worker._newest_version = lambda: 1
    await b.worker.play_round(2)
    episodes = list(b.store.iterate())
    tasks = {each.attempt_id.group: (each.task.task_id, each.seed) for each in episodes}
    worlds = b.worker._worlds
    assert tasks == {
        number: (worlds.setting(position).task.task_id, worlds.setting(position).seed)
        for number, position in {1: 0, 2: 2}.items()
    }
    assert {str(each.attempt_id) for each in episodes} == {f"{RUN}.t{g}.{n}.0" for g in (1, 2) for n in range(SIZE)}
