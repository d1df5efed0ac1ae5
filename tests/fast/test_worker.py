"""The rollout worker over a real ledger, store and episode loop, with worlds and engines that misbehave."""

import asyncio
import itertools
import threading

import pytest
from episode_kit import DONE, World, char_call, ends, goes_on, never, says

from headrace.actors.delivery import Delivery
from headrace.actors.environments.registry import ENVIRONMENTS, EnvironmentKind
from headrace.actors.outcomes import EnvironmentCounts, WorkerStats, total_counts
from headrace.actors.plan import PlayedEpisode
from headrace.actors.tasks.finite import GivenTasks
from headrace.actors.worker import RolloutWorker, WorkerSettings
from headrace.actors.worlds import Worlds
from headrace.platform.config.environments import EnvironmentConfig, SamplingConfig
from headrace.platform.errors import ConfigError, EnvironmentFault, LedgerError, VersionUnavailable
from headrace.platform.ledger.memory import MemoryLedger
from headrace.platform.records import Purpose, Status, Task
from headrace.platform.records.delivery import CommitRequest, LedgerLimits
from headrace.platform.store.episodes import EpisodeStore
from headrace.platform.store.tables import RewardTable
from headrace.platform.testing.episodes import make_episode, policy_turn
from headrace.platform.testing.fakes.engine import ScriptedEngine
from headrace.platform.testing.fakes.renderer import CharRenderer
from headrace.platform.testing.fakes.tasks import ListTasks

RUN = "kit-run"
SIZE = 4


class Bench:
    """A worker and everything around it. `make` builds the n-th world; worlds count what happens to them."""

    def __init__(self, tmp_path, monkeypatch, make, *, engine=None, max_episodes=8, limits=None):
        self.worlds = []
        self.clock = 100.0
        values = {"batch_groups": 2, "max_lag": 1, "drop_zero_variance": False, "max_attempts": 3, **(limits or {})}
        self.ledger = MemoryLedger(RUN, LedgerLimits(**values), lambda: self.clock)
        self.engine = engine or says(DONE)
        self.store = EpisodeStore(str(tmp_path))
        self.rewards = RewardTable(str(tmp_path), "rollout-0")
        self.fence = 0

        def build(args):
            world = make(len(self.worlds) - 2)  # two are built and thrown away, to check the recipe
            self.worlds.append(world)
            return world

        self.tasks = [Task(f"{split}{n}", "kit", split=split) for n in range(50) for split in ("train", "dev")]
        kind = EnvironmentKind(environment=build, tasks=lambda split, seed, args: ListTasks(self.tasks, split, seed))
        monkeypatch.setitem(ENVIRONMENTS, "kit", kind)
        config = EnvironmentConfig(
            name="kit", sampling=SamplingConfig(max_new_tokens=50), reset_deadline_s=5, step_deadline_s=5
        )
        worlds = self.evaluation_worlds = {split: Worlds([config], split, 0) for split in ("train", "dev")}
        settings = WorkerSettings(
            run=RUN,
            worker_id="rollout-0",
            policy_id="scripted",
            group_size=SIZE,
            max_episodes=max_episodes,
            request_deadline_s=5.0,
            idle_s=0.001,
            cancel_every_s=0.01,
        )
        self.worker = RolloutWorker(
            settings,
            worlds["train"],
            CharRenderer(),
            self.engine,
            lambda: max(self.engine.versions(), default=None),
            Delivery(ledger=self.ledger, store=self.store, rewards=self.rewards, worker_id="rollout-0"),
            worlds.__getitem__,
        )

    async def publish(self, batches=1):
        """A new version, so many batches after the head."""
        if not self.fence:
            self.fence = await self.ledger.acquire_learner("test")
        head = (await self.ledger.stats()).head
        number = await self.ledger.stage(self.fence)
        await self.ledger.commit(
            CommitRequest(
                fence=self.fence,
                number=number,
                parent=-1 if head is None else head,
                content_hash=f"h{number}",
                batches=0 if head is None else batches,
                fates={},
            )
        )
        return number

    async def until(self, holds):
        """Let the loops run until `holds(stats)`."""
        async with asyncio.timeout(10):
            while not holds(await self.ledger.stats()):
                await asyncio.sleep(0.002)
                self.worker.stats()

    @property
    def used(self):
        """The worlds that episodes were played in."""
        return [world for world in self.worlds if getattr(world, "resets", None) or world.closed]

    async def check_closed(self):
        """After worker and ledger have stopped: the equation holds, nothing is in flight, nothing is left behind."""
        assert self.worker.stats().running == 0
        assert (await self.ledger.stats()).groups_open == 0, "the worker left a slot running"
        await self.ledger.stop("test")
        stats = await self.ledger.stats()
        assert stats.holds
        assert stats.fates["in_flight"] == 0
        assert self.engine.sessions(0) == 0
        assert all(world.closed for world in self.used)
        return stats


@pytest.fixture
def bench(tmp_path, monkeypatch):
    def make(world=lambda n: World(), **options):
        return Bench(tmp_path, monkeypatch, world, **options)

    return make


@pytest.fixture(autouse=True)
async def no_task_is_left():
    before = asyncio.all_tasks()
    yield
    await asyncio.sleep(0)
    left = {task.get_name() for task in asyncio.all_tasks() - before - {asyncio.current_task()}}
    assert not left, f"left running: {left}"


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
    b = bench(lambda n: World(lambda _: (_ for _ in ()).throw(EnvironmentFault("down"))))
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

    b = bench(lambda n: World(step), max_episodes=SIZE, limits={"group_deadline_s": 10.0})
    b.worker._settings.cancel_every_s = 1e9
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
    b = bench(lambda n: World(never))
    await b.publish()
    if reason == "rolled_back":
        await b.ledger.settle(b.fence, 0)
        number = await b.publish()
        b.engine = says(DONE)
        b.worker._newest_version = lambda: number
        b.worker._generator = says(DONE, versions=(number,))
    await b.worker.start()
    await b.until(lambda stats: stats.groups_open == 2)
    if reason == "lag":
        b.worker._newest_version = lambda: None
        await b.publish(batches=2)
    else:
        b.worker._newest_version = lambda: None
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
    b = bench(lambda n: World(lambda _: (_ for _ in ()).throw(EnvironmentFault("down"))))
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


class Spoilt(ListTasks):
    """Tasks of which the third cannot be had."""

    def next(self, n):
        if self.state % 3 == 2:
            raise ConfigError("sums.jsonl:3: not a task")
        return super().next(n)


# case E8
async def test_a_task_that_cannot_be_made_fails_its_group_and_the_worker_goes_on(bench):
    b = bench()
    b.worker._worlds._sources["kit"] = Spoilt(b.tasks, "train")
    await b.publish()
    await b.worker.start()
    await b.until(lambda stats: stats.dispatch_sequence >= 4 and stats.groups_ready == 4)
    await b.worker.stop()
    stats = await b.check_closed()
    failed = [episode for episode in b.store.iterate() if episode.fault_owner != "none"]
    assert stats.fates["failed:environment"] == len(failed)
    assert len(failed) % SIZE == 0
    assert failed
    assert {episode.dispatch_sequence % 3 for episode in failed} == {2}
    assert {episode.status for episode in failed} == {Status.ENV_BUG}
    assert all(episode.fault.endswith("ConfigError: sums.jsonl:3: not a task") for episode in failed)
    assert b.worker.stats().environments["kit"].faults == {"environment": len(failed)}


async def test_an_evaluated_task_that_cannot_be_made_is_an_outcome_without_a_score(bench):
    b = bench()
    b.evaluation_worlds["dev"]._sources["kit"] = Spoilt(b.tasks, "dev")
    await b.publish()
    outcomes = await b.worker.evaluate(0, "dev", range(6), 0, samples=2)
    assert [outcome.score for outcome in outcomes] == [1.0, 1.0, 1.0, 1.0, None, None] * 2
    faults = [outcome.fault for outcome in outcomes if outcome.score is None]
    assert all(fault.endswith("ConfigError: sums.jsonl:3: not a task") for fault in faults)
    assert {outcome.environment for outcome in outcomes} == {"kit"}


async def test_a_slow_source_of_tasks_does_not_hold_up_the_loop(bench):
    """Somebody else's code runs in a thread, and the episodes that play go on."""
    b = bench()
    making, go_on = threading.Event(), threading.Event()

    class Slow(ListTasks):
        def next(self, n):
            making.set()
            assert go_on.wait(10)
            return super().next(n)

    b.worker._worlds._sources["kit"] = Slow(b.tasks, "train")
    assert b.worker._worlds.may_block(0)
    await b.publish()
    playing = asyncio.create_task(b.worker.play_round(1))
    await asyncio.to_thread(making.wait, 10)
    assert not playing.done()
    go_on.set()
    assert await playing == 1


def test_a_worker_without_room_for_a_group_is_refused(bench):
    with pytest.raises(ConfigError, match=r"max_episodes=3 has no room .*group_size=4"):
        bench(max_episodes=SIZE - 1)


async def test_places_bound_what_is_played_at_once(bench):
    running, most = 0, 0

    async def step(message):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
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


async def test_an_evaluation_is_stored_scored_and_never_in_the_books(bench):
    b = bench(lambda n: World(lambda _: flaky_third(n)))
    await b.publish()
    outcomes = await b.worker.evaluate(0, "dev", range(9), 2)
    assert [outcome.episode_id for outcome in outcomes] == [f"{RUN}.e{position}.2.0" for position in range(9)]
    assert sorted(outcome.score is None for outcome in outcomes) == [False] * 6 + [True] * 3
    assert all(outcome.fault_owner == "environment" for outcome in outcomes if outcome.score is None)
    assert (await b.ledger.stats()).dispatched == 0
    stored = list(b.store.iterate())
    assert {episode.purpose for episode in stored} == {Purpose.EVAL}
    assert {episode.task.split for episode in stored} == {"dev"}


async def test_the_samples_of_an_evaluated_task_share_its_world_and_nothing_else(bench):
    b = bench()
    await b.publish()
    first = await b.worker.evaluate(0, "dev", range(5), 0, samples=3)
    second = await b.worker.evaluate(0, "dev", range(5), 1, samples=3)
    assert [outcome.sample for outcome in first] == [0, 1, 2] * 5
    assert [outcome.episode_id for outcome in first[:3]] == [f"{RUN}.e0.{n}.0" for n in range(3)]
    assert [outcome.episode_id for outcome in second[:3]] == [f"{RUN}.e0.{n}.0" for n in range(3, 6)]
    for position in range(5):
        own = [*first[3 * position : 3 * position + 3], *second[3 * position : 3 * position + 3]]
        assert len({(outcome.environment, outcome.task_id, outcome.seed) for outcome in own}) == 1
    stored = {episode.episode_id: episode for episode in b.store.iterate()}
    assert len(stored) == 30
    drawn = [[stored[each.episode_id].turns[1].seed for each in outcomes] for outcomes in (first, second)]
    assert drawn[0] == drawn[1], "what is sampled depends on the task and the sample, not on the evaluation"
    assert len(set(drawn[0])) == 15


async def test_an_evaluation_plays_each_of_a_few_tasks_once(bench):
    b = bench()
    tasks = [Task(f"few-{n}", "kit", {"n": n}, split="dev") for n in range(4)]
    b.evaluation_worlds["dev"]._sources["kit"] = GivenTasks(tasks, "dev", 0, "kit")
    await b.publish()
    parts = [await b.worker.evaluate(0, "dev", range(start, 9, 2), 0, samples=2) for start in (0, 1)]
    assert sorted(each.task_id for part in parts for each in part) == sorted([task.task_id for task in tasks] * 2)


async def test_counts_by_environment(bench):
    b = bench(lambda n: World(lambda _: flaky_third(n)), limits={"max_attempts": 1})
    await b.publish()
    await b.worker.play_round(3)
    await b.worker.evaluate(0, "dev", range(4), 0)
    stats = b.worker.stats()
    assert stats.environments.keys() == {"kit"}
    counts, episodes = stats.environments["kit"], [e for e in b.store.iterate() if e.purpose is Purpose.TRAIN]
    assert counts.episodes == len(episodes) == sum(stats.statuses.values()) == 3 * SIZE
    assert counts.scored == counts.episodes - counts.faults["environment"] == 8
    assert counts.score_sum == sum(row.value for row in b.rewards.rows() if ".t" in row.episode_id)
    assert counts.turns == sum(len(episode.views) for episode in episodes)
    assert counts.sampled_tokens == sum(episode.cost.sampled_tokens for episode in episodes)
    assert counts.duration_s == pytest.approx(sum(episode.duration_s for episode in episodes))
    before = counts.episodes
    await b.worker.play_round(1)
    assert counts.episodes == before, "what was told does not change afterwards"


def test_contexts_that_were_begun_anew_are_counted():
    """case T3"""
    counts = EnvironmentCounts()
    turns = [policy_turn(segment=segment) for segment in (0, 0, 1, 2)]
    for played in (make_episode(turns), make_episode(turns[:2]), make_episode(())):
        counts.add(PlayedEpisode(episode=played, rewards=(), score=1.0))
    assert (counts.segments_opened, counts.turns) == (2, 6)
    total = total_counts([{"a": counts, "b": EnvironmentCounts(faults={"model": 1})}, {"a": counts}])
    assert (total["a"].segments_opened, total["a"].episodes, total["b"].faults) == (4, 6, {"model": 1})
    assert counts.segments_opened == 2
    stats = WorkerStats(worker_id="w", running=0, statuses={}, faults=(), environments=total)
    assert stats.segments_opened == 4


async def test_the_last_episodes_can_be_read(bench):
    b = bench()
    await b.publish()
    await b.worker.play_round(2)
    assert [str(played.episode.attempt_id) for played in b.worker.recent(3)] == [f"{RUN}.t1.{n}.0" for n in (3, 2, 1)]
    assert len(b.worker.recent(100)) == 2 * SIZE
    assert b.worker.recent(0) == []


def flaky_third(n):
    if n % 3 == 0:
        raise EnvironmentFault("lost")
    return ends(float(n % 2))


async def test_the_times_of_tools_are_known(bench):
    def make(n):
        answers = iter([goes_on(), ends(1.0)])
        return World(lambda _: next(answers))

    b = bench(make, engine=says(char_call(1), DONE))
    await b.publish()
    await b.worker.play_round(1)
    intervals = b.worker.tool_intervals(0.0)
    assert len(intervals) == SIZE
    assert all(start <= end for start, end in intervals)
    assert b.worker.tool_intervals(max(end for _, end in intervals) + 1.0) == []
