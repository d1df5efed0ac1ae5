"""Tasks from a list."""

from collections.abc import Sequence

import numpy as np

from headrace.platform.errors import ConfigError
from headrace.platform.records.message import Task


class ListTasks:
    """The tasks of one split of a list, in a new seeded order each epoch.

    Args:
        tasks: tasks of any splits; those of other splits are left out.
        split: "train", "dev" or "hidden".
        seed: decides the orders.
    """

    def __init__(self, tasks: Sequence[Task], split: str = "train", seed: int = 0) -> None:
        self._tasks = [task for task in tasks if task.split == split]
        self._split = split
        self._seed = seed
        self._position = 0

    @property
    def split(self) -> str:
        """See `TaskSource.split`."""
        return self._split

    @property
    def state(self) -> int:
        """See `TaskSource.state`."""
        return self._position

    def restore(self, state: int) -> None:
        """See `TaskSource.restore`."""
        self._position = state

    def next(self, n: int) -> Sequence[Task]:
        """See `TaskSource.next`.

        Raises:
            ConfigError: when the list has no task of this split.
        """
        if not self._tasks:
            raise ConfigError(f"there is no task of the split {self._split!r}")
        taken = [self._at(position) for position in range(self._position, self._position + n)]
        self._position += n
        return taken

    def _at(self, position: int) -> Task:
        epoch, place = divmod(position, len(self._tasks))
        order = np.random.default_rng((self._seed, epoch)).permutation(len(self._tasks))
        return self._tasks[int(order[place])]
