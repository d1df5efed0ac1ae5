"""What a rollout worker plays and tells: tasks, evaluations, counts."""

import asyncio
import threading

import pytest
from episode_kit import DONE, World, char_call, ends, goes_on, says
from worker_kit import RUN, SIZE, Bench, flaky_third, no_task_left

from headrace.actors.outcomes import EnvironmentCounts, WorkerStats, total_counts
from headrace.actors.plan import PlayedEpisode
from headrace.actors.tasks.finite import GivenTasks
from headrace.platform.errors import ConfigError
from headrace.platform.records import Purpose, Status, Task
from headrace.platform.testing.episodes import make_episode, policy_turn
from headrace.platform.testing.fakes.tasks import ListTasks


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
