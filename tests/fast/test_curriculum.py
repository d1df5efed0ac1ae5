"""The success window: what it prefers, what it forgets, and that a resumed run chooses as if nothing had happened."""

import asyncio
import json
import random

import pytest
from episode_kit import DONE, World, ends, says
from hypothesis import given
from hypothesis import strategies as st

from headrace.actors.delivery import Delivery
from headrace.actors.environments.kind import EnvironmentKind
from headrace.actors.environments.registry import ENVIRONMENTS
from headrace.actors.news import News
from headrace.actors.tasks.curriculum import Curriculum, TaskResult
from headrace.actors.tasks.history import curriculum_from_store, results_from_store
from headrace.actors.worker import RolloutWorker, WorkerSettings
from headrace.actors.worlds import Worlds
from headrace.platform.config import CurriculumConfig, EnvironmentConfig, SamplingConfig, TasksConfig
from headrace.platform.errors import ConfigError
from headrace.platform.ledger.memory import MemoryLedger
from headrace.platform.records import Task
from headrace.platform.records.delivery import CommitRequest, LedgerLimits
from headrace.platform.store.episodes import EpisodeStore
from headrace.platform.store.tables import RewardTable
from headrace.platform.testing.fakes.renderer import CharRenderer
from headrace.trainer.checkpoint import CheckpointState, CheckpointStore

WINDOW = CurriculumConfig(kind="success_window", low=0.2, high=0.8, floor=0.25, memory=4)
results = st.lists(
    st.builds(
        TaskResult,
        environment=st.sampled_from("ab"),
        key=st.sampled_from("xyz"),
        score=st.sampled_from([0.0, 0.5, 1.0]),
        group=st.integers(0, 30),
    ),
    max_size=40,
)


def observed(*scores, key="x", config=WINDOW):
    curriculum = Curriculum(config)
    curriculum.observe(TaskResult("a", key, score, group) for group, score in enumerate(scores))
    return curriculum


class TestWindow:
    @pytest.mark.parametrize(
        ("scores", "rate", "admitted"),
        [
            ((), None, True),
            ((1.0, 0.0), 0.5, True),
            ((0.2, 0.2), 0.2, True),
            ((0.0, 0.0, 0.0), 0.0, False),
            ((1.0, 1.0, 1.0), 1.0, False),
            ((0.0, 0.0, 1.0, 1.0, 1.0, 1.0), 1.0, False),  # only the last four are recent
        ],
    )
    def test_by_hand(self, scores, rate, admitted):
        curriculum = observed(*scores)
        assert curriculum.rate("a", "x") == rate
        assert curriculum.admits("a", "x", 0.9) is admitted
        assert curriculum.rate("b", "x") is None

    @pytest.mark.parametrize(
        ("scores", "rate"), [((3.0, 0.0), 0.5), ((-5.0, 1.0), 0.5), ((2.0, 7.0), 1.0), ((-1.0,), 0.0)]
    )
    def test_a_graded_reward_beyond_1_is_a_task_solved(self, scores, rate):
        assert observed(*scores).rate("a", "x") == rate

    def test_the_floor_lets_some_through(self):
        curriculum = observed(0.0)
        assert [curriculum.admits("a", "x", draw) for draw in (0.0, 0.24, 0.25, 0.99)] == [True, True, False, False]

    @given(results, st.randoms(use_true_random=False))
    def test_the_order_of_results_does_not_matter(self, told, dice):
        one, two = Curriculum(WINDOW), Curriculum(WINDOW)
        one.observe(told)
        shuffled = list(told)
        dice.shuffle(shuffled)
        for result in shuffled:
            two.observe([result])
        assert all(one.rate(e, k) == two.rate(e, k) for e in "ab" for k in "xyz")

    def test_keys(self):
        task = Task("t", "a", {"level": 3})
        assert Curriculum(WINDOW).key(task) == "t"
        by_level = Curriculum(WINDOW.model_copy(update={"level": "level"}))
        assert by_level.key(task) == "3"
        assert by_level.key(Task("t", "a")) == "t"

    def test_what_was_played_longest_ago_is_forgotten_first(self, monkeypatch):
        monkeypatch.setattr("headrace.actors.tasks.curriculum.MOST_KEYS", 3)
        curriculum = Curriculum(WINDOW)
        curriculum.observe(TaskResult("a", str(group), 1.0, group) for group in range(5))
        assert [curriculum.rate("a", str(group)) for group in range(5)] == [None, None, 1.0, 1.0, 1.0]


def write(path, count):
    path.write_text("".join(json.dumps({"n": n, "level": n % 3}) + "\n" for n in range(count)))
    return str(path)


@pytest.fixture
def config(tmp_path, monkeypatch):
    """An environment over 90 rows of three levels."""
    monkeypatch.setitem(ENVIRONMENTS, "kit", EnvironmentKind(environment=lambda args: World()))
    return EnvironmentConfig(
        name="kit",
        tasks=TasksConfig(source=write(tmp_path / "rows.jsonl", 90)),
        sampling=SamplingConfig(max_new_tokens=50),
    )


LEVELS = WINDOW.model_copy(update={"level": "level", "floor": 0.05})


class TestChoice:
    def test_what_is_unknown_is_played_in_its_order(self, config):
        chosen, plain = Worlds([config], "train", 0, WINDOW), Worlds([config], "train", 0)
        assert [chosen.setting(g) for g in range(40)] == [plain.setting(g) for g in range(40)]

    def test_what_is_always_or_never_solved_becomes_rare(self, config):
        worlds = Worlds([config], "train", 0, LEVELS)
        scores = {"0": 0.0, "1": 0.5, "2": 1.0}
        worlds.curriculum.observe(TaskResult("kit", key, score, 1) for key, score in scores.items())
        levels = [worlds.setting(group).task.data["level"] for group in range(300)]
        assert levels.count(1) > 0.8 * len(levels)
        assert levels.count(0) > 0
        assert levels.count(2) > 0

    def test_it_depends_on_the_group_and_on_what_was_told_alone(self, config):
        told = [TaskResult("kit", str(level), float(level == 2), group) for group in range(9) for level in range(3)]
        one, two = Worlds([config], "train", 0, LEVELS), Worlds([config], "train", 0, LEVELS)
        one.curriculum.observe(told)
        two.curriculum.observe(reversed(told))
        assert [one.setting(g) for g in range(50)] == [two.setting(g) for g in reversed(range(50))][::-1]

    def test_evaluation_walks_through_its_tasks(self, config):
        assert Worlds([config], "dev", 0, LEVELS).curriculum is None

    def test_a_level_that_no_task_has_is_refused(self, config):
        with pytest.raises(ConfigError, match=r"curriculum\.level='grade' is no key .*\['level', 'n'\]"):
            Worlds([config], "train", 0, WINDOW.model_copy(update={"level": "grade"}))


class Bench:
    """A worker over one environment, whose score of a task is its `n` modulo 3, halved."""

    def __init__(self, tmp_path, config, curriculum):
        self.root = str(tmp_path)
        self.ledger = MemoryLedger(
            "run", LedgerLimits(batch_groups=50, max_lag=1, drop_zero_variance=False), lambda: 1.0
        )
        self.worlds = Worlds([config], "train", 0, curriculum)
        settings = WorkerSettings(
            run="run", worker_id="w", policy_id="scripted", group_size=2, max_episodes=8, request_deadline_s=5.0
        )
        delivery = Delivery(
            ledger=self.ledger, store=EpisodeStore(self.root), rewards=RewardTable(self.root, "w"), worker_id="w"
        )
        engine = says(DONE)
        self.worker = RolloutWorker(
            settings,
            self.worlds,
            CharRenderer(),
            engine,
            lambda: 0,
            delivery,
            lambda split: Worlds([config], split, 0),
        )

    async def play(self, groups):
        fence = await self.ledger.acquire_learner("test")
        if await self.ledger.stage(fence) == 0:
            await self.ledger.commit(
                CommitRequest(fence=fence, number=0, parent=-1, content_hash="h", batches=0, fates={})
            )
        while groups:
            groups -= await self.worker.play_round(min(groups, 4))
            self.worker.tell(self.worker.news())


class GradedWorld(World):
    async def reset(self, task, seed):
        self._value = task.data["n"] % 3 / 2
        return await super().reset(task, seed)

    async def step(self, message, key):
        return ends(self._value)


@pytest.fixture
def graded(config, monkeypatch):
    monkeypatch.setitem(ENVIRONMENTS, "kit", EnvironmentKind(environment=lambda args: GradedWorld()))
    return config


async def test_a_resumed_run_knows_what_the_interrupted_one_knew(graded, tmp_path):
    bench = Bench(tmp_path / "run", graded, WINDOW)
    await bench.play(30)
    live = bench.worlds.curriculum
    rebuilt = curriculum_from_store(WINDOW, bench.root)
    assert rebuilt._recent.keys() == live._recent.keys()
    assert all(rebuilt.rate(*key) == live.rate(*key) for key in live._recent)
    assert {live.rate(*key) for key in live._recent} == {0.0, 0.5, 1.0}

    again = Worlds([graded], "train", 0, WINDOW)
    again.curriculum.observe(results_from_store(WINDOW, bench.root))
    assert [again.setting(g) for g in range(30, 90)] == [bench.worlds.setting(g) for g in range(30, 90)]


async def test_groups_after_the_checkpoint_are_left_out(graded, tmp_path):
    bench = Bench(tmp_path / "run", graded, WINDOW)
    await bench.play(8)
    assert {result.group for result in results_from_store(WINDOW, bench.root, before=5)} == set(range(5))


async def test_results_are_given_once_and_only_where_they_are_wanted(graded, tmp_path):
    bench = Bench(tmp_path / "run", graded, WINDOW)
    await bench.play(1)
    await bench.worker.play_round(2)
    first = bench.worker.news()
    assert len(first.scores) == 4
    assert {result.environment for result in first.scores} == {"kit"}
    assert not bench.worker.news()
    plain = Bench(tmp_path / "other", graded, None)
    await plain.play(2)
    await plain.worker.play_round(2)
    assert not plain.worker.news()
    plain.worker.tell(first)


async def test_evaluations_teach_the_curriculum_nothing(graded, tmp_path):
    bench = Bench(tmp_path / "run", graded, WINDOW)
    await bench.play(1)
    await bench.worker.evaluate(0, "dev", range(3), 0)
    assert not bench.worker.news()
    assert all(result.group == 0 for result in results_from_store(WINDOW, bench.root))


def test_the_position_in_a_checkpoint_gives_the_same_next_tasks_of_a_mixture(graded, tmp_path):
    configs = [graded, EnvironmentConfig(name="lookup", weight=3.0)]
    before = Worlds(configs, "train", 0)
    for group in range(137):
        before.setting(group)
    store = CheckpointStore(str(tmp_path / "checkpoints"))
    state = CheckpointState(version=4, content_hash="h", batches=4, steps=4, dispatch_sequence=137)
    store.write(state, {"weights": b""})

    found = store.latest_complete()
    position = found[0].dispatch_sequence
    after = Worlds(configs, "train", 0)
    assert [after.setting(position + n) for n in range(60)] == [before.setting(137 + n) for n in range(60)]


async def test_an_open_group_keeps_its_task_whatever_is_observed(graded, tmp_path):
    """P1: the members and retries of a group meet one task."""
    bench = Bench(tmp_path / "run", graded, LEVELS)
    dice = random.Random(0)

    async def teach():
        for group in range(200):
            results = [TaskResult("kit", str(level), dice.random(), group) for level in range(3)]
            bench.worker.tell(News(scores=tuple(results)))
            await asyncio.sleep(0)

    await asyncio.gather(bench.play(12), teach())
    tasks = {}
    for episode in EpisodeStore(bench.root).iterate():
        tasks.setdefault(episode.dispatch_sequence, set()).add(episode.task.task_id)
    assert len(tasks) == 12
    assert all(len(ids) == 1 for ids in tasks.values())
