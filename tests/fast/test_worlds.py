"""What a group plays, and how its world is built."""

from collections import Counter

import pytest
from episode_kit import World, make_plan, play, says

from headrace.actors.environments.registry import ENVIRONMENTS, EnvironmentKind
from headrace.actors.worlds import Worlds
from headrace.platform.config.environments import EnvironmentConfig
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
    settings = [worlds.setting(group) for group in range(400)]
    counts = Counter(setting.config.name for setting in settings)
    assert 250 < counts["lookup"] < 350
    assert all(setting.task.environment == setting.config.name for setting in settings)


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
    assert (played.episode.environment, played.episode.fault) == ("flaky", "OSError: no more sandboxes")
