"""The rollout worker plays, retries, cancels and stops."""

import asyncio
import itertools
import threading

import pytest
from episode_kit import DONE, World, ends, never, says
from worker_kit import SIZE, Bench, down, no_task_left

from headrace.platform.errors import ConfigError, EnvironmentFault, LedgerError, VersionUnavailable
from headrace.platform.records import Status
from headrace.platform.testing.fakes.engine import ScriptedEngine


@pytest.fixture
async def bench(tmp_path, monkeypatch):
    made = []

    def make(world=lambda n: World(), **options):
        made.append(Bench(tmp_path, monkeypatch, world, **options))
        return made[-1]

    yield make
    for each in made:  # a round leaves the oracles of what failed in it at work
        await each.worker._judge.close()


@pytest.fixture(autouse=True)
async def nothing_is_left_running():
    before = asyncio.all_tasks()
    yield
    await asyncio.sleep(0)
    assert not no_task_left(before)


async def test_groups_are_played_until_the_ledger_is_full_and_the_books_close(bench):
    b = bench()
    await b.publish()
    await b.worker.start()
    await b.until(lambda stats: stats.groups_ready == 4)
    await b.worker.stop()
    stats = await b.check_closed()
    assert stats.dispatched == 16
    assert stats.fates["dropped:stopped"] == 16
    assert stats.score_sum == stats.score_count == 16
    assert b.worker.stats().statuses == {"OK": 16}
    assert len(list(b.store.iterate())) == len(list(b.rewards.rows())) == 16


async def test_members_of_a_group_share_task_and_seed_and_nothing_else(bench):
    b = bench()
    await b.publish()
    await b.worker.start()
    await b.until(lambda stats: stats.groups_ready == 4)
    await b.worker.stop()
    episodes = list(b.store.iterate())
    for group in range(4):
        members = [episode for episode in episodes if episode.attempt_id.group == group]
        assert len(members) == SIZE
        assert len({(episode.task.task_id, episode.seed) for episode in members}) == 1
        assert len({episode.turns[1].seed for episode in members}) == SIZE
    assert len({episode.task.task_id for episode in episodes}) == 4
    assert {episode.version.number for episode in episodes} == {0}
    assert {(episode.worker_id, episode.stamps.dispatched_s) for episode in episodes} == {("rollout-0", 100.0)}


async def test_nothing_is_admitted_before_there_is_a_version(bench):
    b = bench(engine=says(DONE, versions=()))
    await b.worker.start()
    await asyncio.sleep(0.02)
    assert (await b.ledger.stats()).dispatched == 0
    await b.worker.stop()
    await b.check_closed()


# case E18
async def test_a_retry_plays_the_same_slot_in_the_same_world(bench):
    tries = itertools.count()
    b = bench(lambda n: World(lambda _: flaky(tries)))
    await b.publish()
    assert await b.worker.play_round(1) == 1
    stats = await b.ledger.stats()
    assert (stats.groups_ready, stats.dispatched, stats.fates["failed:environment"]) == (1, SIZE + 2, 2)
    assert stats.holds
    episodes = list(b.store.iterate())
    again = [episode for episode in episodes if episode.attempt_id.attempt == 1]
    assert len(again) == 2
    for second in again:
        (first,) = [e for e in episodes if e.attempt_id.next_attempt() == second.attempt_id]
        assert (first.task, first.seed) == (second.task, second.seed)
        assert first.status is Status.ENV_TRANSIENT
        assert first.turns[1].seed != second.turns[1].seed, "the retry samples anew"
    assert len(b.used) == SIZE + 2, "a retry has a fresh world"


def flaky(tries):
    if next(tries) < 2:
        raise EnvironmentFault("lost its sandbox")
    return ends(1.0)


# case E8
@pytest.mark.parametrize(
    ("error", "status", "owner"),
    [
        (EnvironmentFault("down"), "ENV_TRANSIENT", "environment"),
        (ZeroDivisionError("in the world"), "ENV_BUG", "environment"),
        (VersionUnavailable("v0"), "ENV_TRANSIENT", "infrastructure"),
    ],
)
@pytest.mark.parametrize("where", ["world", "engine", "constructor"])
async def test_what_always_fails_is_tried_so_often_and_never_rewarded(bench, error, status, owner, where):
    def fail(*_):
        raise error

    def make(n):
        if where == "constructor" and n >= 0:
            raise error
        return World(fail) if where == "world" else World()

    b = bench(make, engine=ScriptedEngine(fail) if where == "engine" else None)
    await b.publish()
    assert await b.worker.play_round(1) == 1
    stats = await b.check_closed()
    if where == "engine":
        status, owner = "ENV_TRANSIENT", "infrastructure"
    tries = 3 if status == "ENV_TRANSIENT" else 1  # what will go wrong again is not tried again
    assert stats.dispatched == tries * SIZE
    assert sum(count for fate, count in stats.fates.items() if fate.startswith("failed:")) == tries * SIZE
    assert (stats.score_count, list(b.rewards.rows())) == (0, [])
    assert b.worker.stats().statuses == {status: tries * SIZE}
    assert type(error).__name__ in b.worker.stats().faults[-1]
    assert {episode.fault_owner for episode in b.store.iterate()} == {owner}


async def test_a_failing_world_does_not_stop_the_loops(bench):
    b = bench(lambda n: World(down))
    await b.publish()
    await b.worker.start()
    await b.until(lambda stats: stats.dispatch_sequence >= 6)
    await b.worker.stop()
    stats = await b.check_closed()
    assert stats.score_count == 0
    assert stats.fates["failed:environment"] > 3 * SIZE


# case E5, E7
async def test_a_group_over_its_deadline_is_refused_and_the_worker_goes_on(bench):
    """The members hang until the ledger has given the group up; their late puts are refused."""
    free = asyncio.Event()

    async def step(message):
        await free.wait()
        return ends(1.0)

    deaf = {"renew_every_s": 1e9, "dispatch_lease_s": 1e9}
    limits = {"group_deadline_s": 10.0, "dispatch_lease_s": 1e9}
    b = bench(lambda n: World(step), max_episodes=SIZE, limits=limits, **deaf)
    await b.publish()
    await b.worker.start()
    await b.until(lambda stats: stats.groups_open == 1)
    await asyncio.sleep(0.01)
    b.clock += 11.0
    free.set()
    await b.until(lambda stats: stats.groups_ready >= 2)
    await b.worker.stop()
    stats = await b.check_closed()
    assert (
        stats.refused["group_closed"] + stats.refused.get("late", 0) == SIZE
        if "group_closed" in stats.refused
        else (stats.refused == {"late": SIZE})
    )
    assert stats.fates["failed:infrastructure"] == SIZE


async def test_attempts_of_a_group_that_is_over_are_cancelled(bench):
    b = bench(lambda n: World(never if n < SIZE else None), max_episodes=SIZE, limits={"group_deadline_s": 10.0})
    await b.publish()
    await b.worker.start()
    await b.until(lambda stats: stats.groups_open == 1)
    b.clock += 11.0
    await b.until(lambda stats: stats.groups_ready >= 2)
    assert b.worker.stats().running <= SIZE
    await b.worker.stop()
    await b.check_closed()
    assert all(world.closed for world in b.used[:SIZE])


@pytest.mark.parametrize("reason", ["lag", "rolled_back"])
async def test_running_groups_are_cancelled_for_the_reason_that_the_ledger_names(bench, reason):
    b = bench(lambda n: World(never), engine=says(DONE, versions=(0, 1) if reason == "rolled_back" else (0,)))
    await b.publish()
    if reason == "rolled_back":
        await b.ledger.settle(b.fence, 0)
        await b.publish()
    await b.worker.start()
    await b.until(lambda stats: stats.groups_open == 2)
    b.worker._newest_version = lambda: None
    if reason == "lag":
        await b.publish(batches=2)
    else:
        await b.ledger.rollback(b.fence, 0)
    await b.until(lambda stats: stats.groups_open == 0)
    stats = await b.ledger.stats()
    assert stats.fates[f"cancelled:{reason}"] == 2 * SIZE
    await b.worker.stop()
    await b.check_closed()


async def test_a_stop_in_mid_episode_cancels_and_tells_the_ledger(bench):
    b = bench(lambda n: World(never))
    await b.publish()
    await b.worker.start()
    await b.until(lambda stats: stats.groups_open == 2)
    await asyncio.sleep(0.01)
    await b.worker.stop()
    stats = await b.check_closed()
    assert stats.fates["cancelled:stopped"] == 2 * SIZE
    assert len(b.used) == 2 * SIZE


async def test_a_stop_right_after_the_start_leaves_nothing(bench):
    for waits in range(6):
        b = bench()
        await b.publish()
        await b.worker.start()
        for _ in range(waits):
            await asyncio.sleep(0)
        await b.worker.stop()
        await b.check_closed()


async def test_a_batch_on_its_way_to_the_ledger_is_not_torn_by_a_stop(bench):
    b = bench()
    await b.publish()
    writing, go_on = threading.Event(), threading.Event()
    write = b.store.write

    def slow_write(episodes, worker):
        writing.set()
        go_on.wait(10)
        return write(episodes, worker)

    b.store.write = slow_write
    await b.worker.start()
    await asyncio.to_thread(writing.wait, 10)
    stopping = asyncio.create_task(b.worker.stop())
    await asyncio.sleep(0.02)
    assert not stopping.done()
    go_on.set()
    await stopping
    stats = await b.check_closed()
    assert stats.score_count == stats.dispatched == stats.fates["dropped:stopped"] >= 2 * SIZE


async def test_a_retry_that_comes_in_while_stopping_is_given_back(bench):
    b = bench(lambda n: World(down))
    await b.publish()
    writing, go_on = threading.Event(), threading.Event()
    write = b.store.write

    def slow_write(episodes, worker):
        writing.set()
        go_on.wait(10)
        return write(episodes, worker)

    b.store.write = slow_write
    await b.worker.start()
    await asyncio.to_thread(writing.wait, 10)
    stopping = asyncio.create_task(b.worker.stop())
    await asyncio.sleep(0.02)
    go_on.set()
    await stopping
    stats = await b.check_closed()
    assert stats.fates["failed:environment"] == stats.fates["cancelled:stopped"] >= 2 * SIZE


async def test_a_stopped_worker_can_start_again_and_stop_twice(bench):
    b = bench()
    await b.publish()
    await b.worker.stop()
    for ready in (2, 4):
        await b.worker.start()
        await b.until(lambda stats, ready=ready: stats.groups_ready >= ready)
        await b.worker.stop()
        await b.worker.stop()
    await b.check_closed()


@pytest.mark.parametrize("what", ["store", "ledger"])
async def test_what_ends_a_loop_is_said(bench, what):
    b = bench()
    await b.publish()

    def full(*_):
        raise OSError(28, "No space left on device")

    async def gone(*_):
        raise LedgerError("the server is gone")

    if what == "store":
        b.store.write = full
    else:
        b.ledger.admit = gone
    await b.worker.start()
    with pytest.raises((OSError, LedgerError), match=r"No space|server is gone"):
        await b.until(lambda stats: False)
    if what == "store":
        with pytest.raises(OSError, match="No space"):
            await b.worker.stop()
    else:
        await b.worker.stop()


def test_a_worker_without_room_for_a_group_is_refused(bench):
    with pytest.raises(ConfigError, match=r"max_episodes=3 has no room .*group_size=4"):
        bench(max_episodes=SIZE - 1)


async def test_places_bound_what_is_played_at_once(bench):
    running, most = 0, 0

    async def step(message):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return ends(1.0)

    b = bench(lambda n: World(step), max_episodes=2 * SIZE + 1)
    await b.publish()
    await b.worker.start()
    await b.until(lambda stats: stats.groups_ready == 4)
    await b.worker.stop()
    assert most == 2 * SIZE
    most = 0
    await b.worker.evaluate(0, "dev", range(30), 0)
    assert most == 2 * SIZE + 1
