"""What every `TaskSource` must do. Run each function of `TASK_SUITE` with a context of your own."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec

from headrace.platform.contracts import TaskSource
from headrace.platform.records.message import Task
from headrace.platform.testing.conformance.support import survives_json

_MANY = 50


@dataclass(kw_only=True, slots=True, frozen=True)
class TaskContext:
    """What the suite runs against: `make` returns a fresh source for a split, always with the same seed."""

    make: Callable[[str], TaskSource]
    splits: Sequence[str] = ("train", "dev", "hidden")


async def position_decides(context: TaskContext) -> None:
    """Group g plays task g, so any worker can take any group."""
    for split in context.splits:
        whole = list(context.make(split).next(_MANY))
        assert len(whole) == _MANY, f"asked {split} for {_MANY} tasks and got {len(whole)}; finite data starts over"
        parts = context.make(split)
        pieces = [*parts.next(3), *parts.next(0), *parts.next(_MANY - 3)]
        assert pieces == whole, f"the tasks of {split} depend on how many are taken at once"


async def state_is_a_position(context: TaskContext) -> None:
    """A checkpoint holds the state and nothing else."""
    for split in context.splits:
        source = context.make(split)
        first = source.state
        early = list(source.next(5))
        middle = source.state
        late = list(source.next(_MANY))
        source.restore(first)
        assert list(source.next(5)) == early, f"{split}: going back to {first} gives other tasks"
        assert source.state == middle, f"{split}: 5 tasks after {first} the state is {source.state}, not {middle}"
        other = context.make(split)
        other.restore(middle)
        assert list(other.next(_MANY)) == late, f"{split}: a fresh source that is put at {middle} gives other tasks"


async def splits_are_disjoint(context: TaskContext) -> None:
    """No task and no seed of one split is in another (case V2)."""
    tasks = {split: list(context.make(split).next(4 * _MANY)) for split in context.splits}
    for one in context.splits:
        for other in context.splits:
            if one < other:
                shared = {t.task_id for t in tasks[one]} & {t.task_id for t in tasks[other]}
                assert not shared, f"{one} and {other} share tasks, such as {sorted(shared)[:3]}"
                seeds = {t.seed for t in tasks[one]} & {t.seed for t in tasks[other]}
                assert not seeds, f"{one} and {other} share seeds, such as {sorted(seeds)[:3]}"


async def seeds_are_apart(context: TaskContext) -> None:
    """Every task has a seed, also after many, and no split ever has one of another (case V2)."""
    owners: dict[int, str] = {}
    for split in context.splits:
        source = context.make(split)
        for position in (0, 1_000, 1_000_000):
            source.restore(position)
            for task in source.next(_MANY):
                assert task.seed > 0, f"task {task.task_id} of {split} has no seed; give it one that is above 0"
                other = owners.setdefault(task.seed, split)
                assert other == split, f"{other} and {split} share the seed {task.seed}"


async def an_id_names_one_task(context: TaskContext) -> None:
    """Results are counted and compared by id: one that comes again, as in the next epoch, is the same task."""
    known: dict[str, Task] = {}
    for split in context.splits:
        for task in context.make(split).next(4 * _MANY):
            first = known.setdefault(task.task_id, task)
            assert (first.data, first.version) == (task.data, task.version), (
                f"the id {task.task_id!r} names two tasks: {first.data!r} and {task.data!r}"
            )


async def tasks_say_where_they_belong(context: TaskContext) -> None:
    """Each has an id, its environment and the split that it is from."""
    for split in context.splits:
        source = context.make(split)
        assert source.split == split, f"a source of {split} says that it is of {source.split}"
        for task in source.next(_MANY):
            assert task.split == split, f"{split} gave task {task.task_id} of {task.split}"
            assert task.task_id and task.environment, f"a task without an id or an environment: {task}"


async def tasks_survive_the_wire(context: TaskContext) -> None:
    """A task's data is JSON-safe."""
    for split in context.splits:
        for task in context.make(split).next(_MANY):
            assert survives_json(task.data), f"the data of {task.task_id} is not JSON-safe: {task.data!r}"
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(task), type=Task) == task, f"{task} changes in a hop"


TASK_SUITE: dict[str, Callable[[TaskContext], Awaitable[None]]] = {
    check.__name__: check
    for check in (
        position_decides,
        state_is_a_position,
        splits_are_disjoint,
        seeds_are_apart,
        an_id_names_one_task,
        tasks_say_where_they_belong,
        tasks_survive_the_wire,
    )
}
