"""The suite for task sources, over every kind there is, and over sources that are wrong in one way each."""

import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.actors.environments.guess import GuessTasks
from headrace.actors.environments.lookup import LookupTasks
from headrace.actors.tasks import open_tasks, rows_tasks
from headrace.platform.config import TasksConfig
from headrace.platform.errors import ConfigError
from headrace.platform.records import Task
from headrace.platform.testing.conformance.support import run_suite
from headrace.platform.testing.conformance.tasks import TASK_SUITE, TaskContext
from headrace.platform.testing.fakes.tasks import ListTasks

SPLITS = ("train", "dev", "hidden")
TASKS = [
    Task(f"{split}-{n}", "counter", {"n": n}, split=split, seed=1000 * index + n + 1)
    for index, split in enumerate(SPLITS)
    for n in range(7)
]
ROWS = [{"prompt": f"{n} + {n}", "answer": [2 * n, None], "level": n % 3} for n in range(90)]


def context(make):
    return TaskContext(make=make)


def square(seed):
    return {"prompt": f"{seed} squared", "answer": seed * seed % 1000}


def few(seed):
    return {"n": seed % 50}


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def json_lines(folder):
    return TasksConfig(source=lines(folder / "rows.jsonl", ROWS))


def own_files(folder):
    parts = {"source": ROWS[:50], "dev": ROWS[50:70], "hidden": ROWS[70:]}
    return TasksConfig(**{name: lines(folder / f"{name}.jsonl", rows) for name, rows in parts.items()})


def with_ids_and_seeds(folder):
    return TasksConfig(
        source=lines(folder / "rows.jsonl", [{**row, "id": n, "seed": n + 1} for n, row in enumerate(ROWS)])
    )


def parquet(folder):
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "rows.parquet")
    return TasksConfig(source=str(folder / "rows.parquet"))


def mixed_folder(folder):
    (folder / "data").mkdir()
    lines(folder / "data" / "a.jsonl", ROWS[:30])
    pq.write_table(pa.Table.from_pylist(ROWS[30:]), folder / "data" / "b.parquet")
    return TasksConfig(source=str(folder / "data"))


def saved_data_set(folder):
    datasets.Dataset.from_list(ROWS).save_to_disk(folder / "set")
    return TasksConfig(source=str(folder / "set"))


def saved_splits(folder):
    parts = {"train": ROWS[:50], "validation": ROWS[50:70], "test": ROWS[70:]}
    datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in parts.items()}).save_to_disk(
        folder / "set"
    )
    return TasksConfig(source=str(folder / "set"))


def generator(folder):
    return TasksConfig(source=f"{__file__}:square")


def generator_of_few(folder):
    return TasksConfig(source=f"{__file__}:few", dev_share=0.3, hidden_share=0.3)


def generator_with_a_limit(folder):
    return TasksConfig(source=f"{__file__}:square", limit=25)


def generator_with_ranges(folder):
    return TasksConfig(source=f"{__file__}:square", seeds={"train": (0, 60), "dev": (60, 80), "hidden": (80, 90)})


def reasoning_gym(folder):
    return TasksConfig(source="reasoning_gym:chain_sum", dev_share=0.3, hidden_share=0.3)


KINDS = (
    json_lines,
    own_files,
    with_ids_and_seeds,
    parquet,
    mixed_folder,
    saved_data_set,
    saved_splits,
    generator,
    generator_of_few,
    generator_with_a_limit,
    generator_with_ranges,
    reasoning_gym,
)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
async def test_what_a_recipe_names_conforms(kind, tmp_path):
    config = kind(tmp_path)
    await run_suite(TASK_SUITE, context(lambda split: open_tasks(config, split, 3, "kit")))


@pytest.mark.parametrize(
    "rows", [ROWS, square, datasets.Dataset.from_list(ROWS), TASKS], ids=lambda rows: type(rows).__name__
)
async def test_what_an_environment_brings_conforms(rows):
    await run_suite(TASK_SUITE, context(lambda split: rows_tasks(rows, split, 3, "kit")))


@pytest.mark.parametrize("source", [LookupTasks, GuessTasks])
async def test_our_own_environments_conform(source):
    await run_suite(TASK_SUITE, context(lambda split: source(split, 3)))


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


class Seedless(ListTasks):
    def next(self, n):
        return [Task(task.task_id, "counter", task.data, split=task.split) for task in super().next(n)]


class SeedsMeetLater(ListTasks):
    def next(self, n):
        first = self.state
        tasks = super().next(n)
        seeds = range(first, first + n) if self.split == "train" else range(1_000_000 + first, 1_000_000 + first + n)
        return [
            Task(t.task_id, "counter", t.data, split=t.split, seed=s + 1) for t, s in zip(tasks, seeds, strict=True)
        ]


class NumbersPlaces(ListTasks):
    def next(self, n):
        return [
            Task(f"{task.split}-{place % 3}", "counter", task.data, split=task.split)
            for place, task in enumerate(super().next(n))
        ]


class WrongData(ListTasks):
    def next(self, n):
        return [Task(task.task_id, "counter", {"n": (1, 2)}, split=task.split) for task in super().next(n)]


@pytest.mark.parametrize(
    ("make", "check", "message"),
    [
        (lambda split: Repeats(TASKS, split), "position_decides", "depend on how many"),
        (lambda split: Forgets(TASKS, split), "state_is_a_position", "gives other tasks"),
        (Mixes, "splits_are_disjoint", "share tasks"),
        (lambda split: Seedless(TASKS, split), "seeds_are_apart", "task train-. of train has no seed"),
        (lambda split: SeedsMeetLater(TASKS, split), "seeds_are_apart", "train and dev share the seed 1000001"),
        (lambda split: NumbersPlaces(TASKS, split), "an_id_names_one_task", "'train-.' names two tasks"),
        (Mixes, "tasks_say_where_they_belong", "dev gave task train-"),
        (lambda split: WrongData(TASKS, split), "tasks_survive_the_wire", "not JSON-safe"),
    ],
)
async def test_the_suite_finds_what_is_wrong(make, check, message):
    with pytest.raises(AssertionError, match=rf"{check}: .*{message}"):
        await run_suite({check: TASK_SUITE[check]}, context(make))
