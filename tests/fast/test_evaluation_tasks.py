"""Which positions an evaluation plays: none at which an environment's tasks begin anew."""

import pytest
from episode_kit import World

from headrace.actors.environments.registry import ENVIRONMENTS, EnvironmentKind
from headrace.actors.tasks import open_tasks
from headrace.actors.tasks.finite import GivenTasks
from headrace.actors.worlds import Worlds
from headrace.platform.config import EnvironmentConfig, TasksConfig
from headrace.platform.records import Task
from headrace.platform.testing.fakes.tasks import ListTasks


class Forgetful(ListTasks):
    """A user's source that cannot count."""

    def __len__(self):
        raise KeyError("how many?")


@pytest.fixture
def worlds(monkeypatch):
    """Worlds of environments, each of a weight and a source of dev tasks."""

    def make(**environments):
        for name, (_, source) in environments.items():
            kind = EnvironmentKind(environment=lambda args: World(), tasks=lambda *_, source=source: source)
            monkeypatch.setitem(ENVIRONMENTS, name, kind)
        configs = [EnvironmentConfig(name=name, weight=weight) for name, (weight, _) in environments.items()]
        return Worlds(configs, "dev", 0)

    return make


def given(count):
    return GivenTasks([Task(f"t{n}", "kit", split="dev") for n in range(count)], "dev", 0, "kit")


def played(worlds, positions):
    return [worlds.setting(position).task for position in positions]


def test_a_finite_source_is_played_once(worlds):
    few = worlds(few=(1.0, given(3)))
    assert few.distinct(range(256)) == [0, 1, 2]
    assert {task.task_id for task in played(few, range(3))} == {"t0", "t1", "t2"}
    assert few.distinct([1, 3, 5]) == [1], "each worker has its own positions"


def test_in_a_mixture_each_environment_is_played_once(worlds):
    mixed = worlds(few=(3.0, given(3)), many=(1.0, given(500)))
    positions = mixed.distinct(range(100))
    names = [task.environment for task in played(mixed, positions)]
    every = [task.environment for task in played(mixed, range(100))]
    assert names.count("few") == 3 and names.count("many") == every.count("many") > 10
    assert len({(task.environment, task.task_id) for task in played(mixed, positions)}) == len(positions)


@pytest.mark.parametrize("source", [ListTasks([Task("t", "kit", split="dev")], "dev"), given(300)])
def test_what_does_not_end_is_played_as_asked(worlds, source):
    assert worlds(many=(1.0, source)).distinct(range(256)) == list(range(256))


def test_a_source_that_cannot_count_is_taken_as_endless(worlds):
    source = Forgetful([Task("t", "kit", split="dev")], "dev")
    assert worlds(broken=(1.0, source)).distinct(range(5)) == list(range(5))


SEEDS = {"train": [100, 200], "dev": [0, 5], "hidden": [300, 310]}


@pytest.mark.parametrize(
    ("settings", "count"), [({}, 50), ({"limit": 7}, 7), ({"seeds": SEEDS}, 5), ({"limit": 3, "seeds": SEEDS}, 3)]
)
def test_generators_count_what_they_are_limited_to(tmp_path, worlds, settings, count):
    (tmp_path / "sums.py").write_text("def make(seed):\n    return {'prompt': str(seed)}\n")
    config = TasksConfig(source=f"{tmp_path}/sums.py:make", **settings)
    made = worlds(sums=(1.0, open_tasks(config, "dev", 0, "sums")))
    positions = made.distinct(range(50))
    assert len({task.task_id for task in played(made, positions)}) == len(positions) == count
