"""What every `TaskSource` here is: a function from positions to tasks, and a position."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from headrace.platform.records.message import Task


class TaskSequence(ABC):
    """A `TaskSource` whose task at a position depends on the position alone.

    Args:
        split: "train", "dev" or "hidden".
        seed: the run's seed.
        environment: the name that the tasks bear.
    """

    def __init__(self, split: str, seed: int, environment: str) -> None:
        self._split = split
        self._seed = seed
        self._environment = environment
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
        """See `TaskSource.next`."""
        tasks = [self._at(position) for position in range(self._position, self._position + n)]
        self._position += n
        return tasks

    @abstractmethod
    def _at(self, position: int) -> Task:
        """The task at `position`."""
