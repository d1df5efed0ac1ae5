import pytest

from headrace.platform.errors import ConfigError
from headrace.platform.records import Task
from headrace.platform.testing.conformance.support import run_suite
from headrace.platform.testing.conformance.tasks import TASK_SUITE, TaskContext
from headrace.platform.testing.fakes.tasks import ListTasks

SPLITS = ("train", "dev", "hidden")
TASKS = [
    Task(f"{split}-{n}", "counter", {"n": n}, split=split, seed=1000 * index + n)
    for index, split in enumerate(SPLITS)
    for n in range(7)
]


def context(make):
    return TaskContext(make=make)


@pytest.mark.parametrize("name", TASK_SUITE)
async def test_the_fake_conforms(name):
    await TASK_SUITE[name](context(lambda split: ListTasks(TASKS, split, seed=3)))


def test_every_epoch_has_each_task_once_in_a_new_order():
    source = ListTasks(TASKS, seed=1)
    epochs = [[task.task_id for task in source.next(7)] for _ in range(4)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert [task.task_id for task in ListTasks(TASKS, seed=2).next(7)] != epochs[0]


def test_no_task_at_all_is_a_configuration_error():
    with pytest.raises(ConfigError, match="no task of the split 'dev'"):
        ListTasks([Task("a", "counter")], "dev").next(1)


class Repeats(ListTasks):
    def next(self, n):
        first = super().next(1)
        self._position += n - 1
        return list(first) * n


class Forgets(ListTasks):
    def restore(self, state):
        self._position = 0


class Mixes(ListTasks):
    def __init__(self, split):
        super().__init__(TASKS, "train")
        self._split = split


class WrongData(ListTasks):
    def next(self, n):
        return [Task(task.task_id, "counter", {"n": (1, 2)}, split=task.split) for task in super().next(n)]


@pytest.mark.parametrize(
    ("make", "check", "message"),
    [
        (lambda split: Repeats(TASKS, split), "position_decides", "depend on how many"),
        (lambda split: Forgets(TASKS, split), "state_is_a_position", "gives other tasks"),
        (Mixes, "splits_are_disjoint", "share tasks"),
        (Mixes, "tasks_say_where_they_belong", "dev gave task train-"),
        (lambda split: WrongData(TASKS, split), "tasks_survive_the_wire", "not JSON-safe"),
    ],
)
async def test_the_suite_finds_what_is_wrong(make, check, message):
    with pytest.raises(AssertionError, match=rf"{check}: .*{message}"):
        await run_suite({check: TASK_SUITE[check]}, context(make))
