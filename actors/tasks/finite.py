"""Tasks of which there is a known number: each once an epoch, in a new seeded order every time."""

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headrace.actors.tasks.sequence import TaskSequence
from headrace.actors.tasks.splits import Part
from headrace.platform.errors import ConfigError
from headrace.platform.records.message import Task
from headrace.platform.seeding import derive_seed, split_seed

ID_DIGITS = 16
"""How much of a content's hash, in hex, names a task without an id."""


@functools.lru_cache(maxsize=4)
def epoch_order(seed: int, split: str, epoch: int, size: int) -> npt.NDArray[np.int64]:
    """A permutation of `range(size)`, i64[size]; from numpy's frozen generator, so it is the same for ever."""
    sequence = np.random.SeedSequence(derive_seed("epoch", seed, split, epoch))
    return np.random.RandomState(np.random.MT19937(sequence)).permutation(size)


class FiniteTasks(TaskSequence):
    """Tasks out of rows.

    A task's id is the row's `id`, or the beginning of a hash of its content; its version is the whole hash. Its seed
    is the row's `seed`, or one of its own for each split, row and epoch.

    Args:
        part: the rows of the split, at least one.
        id_prefix: goes before ids that rows bring along.
    """

    def __init__(self, part: Part, split: str, seed: int, environment: str, id_prefix: str = "") -> None:
        super().__init__(split, seed, environment)
        self._part = part
        self._id_prefix = id_prefix

    def __len__(self) -> int:
        return len(self._part.indices)

    @property
    def part(self) -> Part:
        """The rows of the split."""
        return self._part

    def _at(self, position: int) -> Task:
        epoch, place = divmod(position, len(self))
        index = int(self._part.indices[epoch_order(self._seed, self._split, epoch, len(self))[place]])
        rows = self._part.rows
        data, digest, seed = rows[index], rows.digest(index).hex(), rows.seed(index)
        return Task(
            task_id=f"{self._id_prefix}{data['id']}" if "id" in data else digest[:ID_DIGITS],
            environment=self._environment,
            data=data,
            version=digest,
            split=self._split,
            # A task's seed 0 would mean that it has none.
            seed=seed or split_seed(self._split, "row", self._seed, digest, epoch if seed is None else "zero"),
        )


class GivenTasks(TaskSequence):
    """Tasks that are there already; those of other splits are left out.

    Args:
        tasks: of any splits, each with an id of its own.

    Raises:
        ConfigError: for an id that is used twice, or when no task is of this split.
    """

    def __init__(self, tasks: Sequence[Task], split: str, seed: int, environment: str) -> None:
        super().__init__(split, seed, environment)
        known: dict[str, Task] = {}
        for task in tasks:
            if known.setdefault(task.task_id, task) is not task:
                raise ConfigError(
                    f"two tasks have the id {task.task_id!r}, of {known[task.task_id].split} and of {task.split};"
                    " give each its own"
                )
        self._tasks = [task for task in tasks if task.split == split]
        if not self._tasks:
            raise ConfigError(f"none of the {len(tasks)} tasks of {environment} is of the split {split!r}")

    def __len__(self) -> int:
        return len(self._tasks)

    def _at(self, position: int) -> Task:
        epoch, place = divmod(position, len(self))
        return self._tasks[int(epoch_order(self._seed, self._split, epoch, len(self))[place])]
