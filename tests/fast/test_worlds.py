"""What a group plays, and how its world is built."""

import json
from collections import Counter

import pytest
from episode_kit import World, make_plan, play, says

from headrace.actors.environments.registry import ENVIRONMENTS, EnvironmentKind
from headrace.actors.tasks.generated import nth_of_range
from headrace.actors.worlds import Worlds
from headrace.platform.config import CurriculumConfig, EnvironmentConfig, TasksConfig
from headrace.platform.errors import ConfigError, NotFound
from headrace.platform.records import Status, Task
from headrace.platform.testing.fakes.tasks import ListTasks


@pytest.fixture
def counter_kind(monkeypatch):
    """A second environment beside lookup; tasks without a seed."""
    tasks = [Task(f"c{n}", "counter", {"n": n}, split=split) for n in range(5) for split in ("train", "dev")]
    kind = EnvironmentKind(
        environment=lambda args: World(), tasks=lambda split, seed, args: ListTasks(tasks, split, seed)
    )
    monkeypatch.setitem(ENVIRONMENTS, "counter", kind)


LOOKUP = EnvironmentConfig(name="lookup", args={"hops": [1]})
BOTH = [EnvironmentConfig(name="lookup", weight=3.0), EnvironmentConfig(name="counter")]


def test_a_group_plays_the_same_whoever_asks_and_when():
    one, two = Worlds([LOOKUP], "train", 3), Worlds([LOOKUP], "train", 3)
    forwards = [one.setting(group) for group in range(20)]
    backwards = [two.setting(group) for group in reversed(range(20))]
    assert forwards == backwards[::-1]
    assert len({setting.task.task_id for setting in forwards}) == 20


def test_other_seeds_and_splits_play_other_tasks():
    base = Worlds([LOOKUP], "train", 3)
    for other in (Worlds([LOOKUP], "train", 4), Worlds([LOOKUP], "dev", 3)):
        pairs = [(base.setting(group), other.setting(group)) for group in range(20)]
        assert all(one.seed != two.seed for one, two in pairs)
        assert [one.task.data for one, _ in pairs] != [two.task.data for _, two in pairs]


def test_args_reach_their_own_part():
    worlds = Worlds([EnvironmentConfig(name="lookup", args={"hops": [2], "latency_s": 0.5})], "train", 0)
    assert all(len(worlds.setting(group).task.data["chain"]) == 2 for group in range(10))
    assert worlds.environment(worlds.setting(0).config)._latency_s == 0.5


@pytest.mark.usefixtures("counter_kind")
def test_environments_are_mixed_by_weight():
    worlds = Worlds(BOTH, "train", 0)
    settings = [worlds.setting(group) for group in range(1000)]
    assert Counter(setting.config.name for setting in settings) == {"lookup": 750, "counter": 250}
    assert all(setting.task.environment == setting.config.name for setting in settings)


@pytest.mark.usefixtures("counter_kind")
def test_a_short_evaluation_leaves_no_environment_out():
    configs = [EnvironmentConfig(name="lookup", weight=9.0), EnvironmentConfig(name="counter")]
    for seed in range(5):
        worlds = Worlds(configs, "dev", seed)
        assert [worlds.setting(group).config.name for group in range(4)] == ["lookup", "counter", "lookup", "lookup"]


@pytest.mark.usefixtures("counter_kind")
def test_a_uniform_curriculum_gives_every_environment_the_same_share():
    worlds = Worlds(BOTH, "train", 0, CurriculumConfig(kind="uniform"))
    assert Counter(worlds.setting(group).config.name for group in range(1000)) == {"lookup": 500, "counter": 500}


@pytest.mark.usefixtures("counter_kind")
def test_every_task_of_an_environment_comes_once_an_epoch_also_in_a_mixture():
    worlds = Worlds(BOTH, "train", 0)
    ids = [s.task.task_id for group in range(1000) if (s := worlds.setting(group)).config.name == "counter"]
    assert len(ids) == 250
    assert all(len(set(ids[start : start + 5])) == 5 for start in range(0, 250, 5))


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.usefixtures("counter_kind")
def test_tasks_of_the_recipe_replace_those_of_the_environment(tmp_path):
    tasks = TasksConfig(source=write(tmp_path / "rows.jsonl", [{"n": n} for n in range(100, 140)]))
    setting = Worlds([EnvironmentConfig(name="counter", tasks=tasks)], "train", 0).setting(0)
    assert setting.task.data["n"] >= 100
    assert setting.task.environment == "counter"


@pytest.mark.usefixtures("counter_kind")
def test_one_environment_twice_under_two_names(tmp_path):
    """Tasks bear the name by which the recipe knows their environment."""
    own = [{"n": n} for n in range(40)]
    configs = [
        EnvironmentConfig(name="counter"),
        EnvironmentConfig(name="counter", alias="mine", tasks=TasksConfig(source=write(tmp_path / "rows.jsonl", own))),
        EnvironmentConfig(name="lookup", alias="chains", args={"hops": [2]}),
    ]
    worlds = Worlds(configs, "train", 0)
    settings = [worlds.setting(group) for group in range(60)]
    assert {setting.task.environment for setting in settings} == {"counter", "mine", "chains"}
    assert all(setting.task.environment == setting.config.known_as for setting in settings)


def test_an_environment_without_tasks_asks_for_some(monkeypatch):
    monkeypatch.setitem(ENVIRONMENTS, "bare", EnvironmentKind(environment=lambda args: World()))
    with pytest.raises(ConfigError, match=r"bare brings no tasks; .*tasks: \{source: \./tasks\.jsonl\}"):
        Worlds([EnvironmentConfig(name="bare")], "train", 0)


CODE = """
def some(seed):
    if seed % 4 == 3:
        return {"n": 1 / 0}
    return {"n": seed}
"""


async def test_a_task_that_cannot_be_made_is_a_fault_of_its_group(tmp_path, monkeypatch):
    monkeypatch.setitem(ENVIRONMENTS, "bare", EnvironmentKind(environment=lambda args: World()))
    (tmp_path / "make.py").write_text(CODE)
    seeds = {"train": (4, 7 + 1), "dev": (8, 9), "hidden": (9, 10)}
    tasks = TasksConfig(source=f"{tmp_path}/make.py:some", seeds=seeds)
    seed = next(n for n in range(99) if nth_of_range((4, 8), n, "train", 0) != 7)
    monkeypatch.setattr("headrace.actors.tasks.generated._CHECKED_SEEDS", 0)
    worlds = Worlds([EnvironmentConfig(name="bare", tasks=tasks)], "train", seed)
    settings = [worlds.made_setting(group) for group in range(4)]
    (bad,) = [setting for setting in settings if setting.error]
    assert all(worlds.may_block(group) for group in range(4))
    assert (bad.task.environment, bad.task.split) == ("bare", "train")
    played = await play(worlds.session(bad), says([65]), plan=make_plan(bad.task))
    assert (played.episode.status, played.episode.fault_owner, played.score) == (Status.ENV_BUG, "environment", None)
    assert "make.py:4 in some: ZeroDivisionError: division by zero (generator some, seed 7)" in played.episode.fault
    good = next(setting for setting in settings if not setting.error)
    assert (await play(worlds.session(good), says([65]), plan=make_plan(good.task))).score == 1.0


@pytest.mark.usefixtures("counter_kind")
def test_a_task_without_a_seed_gets_one_of_its_group():
    """P1: a second epoch over a task is a new group, so it meets another seed."""
    worlds = Worlds([BOTH[1]], "train", 0)
    settings = [worlds.setting(group) for group in range(10)]
    assert len({setting.seed for setting in settings}) == 10
    assert len({setting.task.task_id for setting in settings}) == 5
    assert Worlds([BOTH[1]], "dev", 0).setting(0).seed != settings[0].seed


def test_mistakes_are_found_before_anything_starts():
    with pytest.raises(NotFound, match="lookup"):
        Worlds([EnvironmentConfig(name="look")], "train", 0)
    with pytest.raises(ConfigError, match="hop"):
        Worlds([EnvironmentConfig(name="lookup", args={"hop": [1]})], "train", 0)
    with pytest.raises(ConfigError, match="latency_s"):
        Worlds([EnvironmentConfig(name="lookup", args={"latency_s": -1})], "train", 0)


async def test_a_world_that_cannot_be_built_is_a_fault_of_its_episode(monkeypatch):
    built = []

    def build(args):
        if built:
            raise OSError("no more sandboxes")
        built.append(World())
        return built[0]

    kind = EnvironmentKind(environment=build, tasks=ENVIRONMENTS["lookup"].tasks)
    monkeypatch.setitem(ENVIRONMENTS, "flaky", kind)
    worlds = Worlds([EnvironmentConfig(name="flaky")], "train", 0)
    played = await play(worlds.async_environment(worlds.setting(0).config), says([65]), plan=make_plan())
    assert (played.episode.status, played.score) == (Status.ENV_BUG, None)
    assert played.episode.environment == "flaky"
    assert played.episode.fault.endswith(" in build: OSError: no more sandboxes")
