"""What both doors are made of: rows that become tasks, a reward, and a wrong column found before anything starts."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from headrace.actors.environments.doors.prompts import opening_messages
from headrace.actors.environments.kind import EnvironmentKind, Origin
from headrace.actors.scoring.reward_function import RewardScorer
from headrace.platform.config.environments import ScorerConfig
from headrace.platform.contracts import Environment, Scorer, TaskSource
from headrace.platform.errors import ConfigError
from headrace.platform.records.message import Message, Task

_TRIED = 4  # positions


class RowsDoor(ABC):
    """A `Door` over rows with a reward; what kind of session plays them is the subclass's business."""

    def __init__(self, rows: Any, reward: Callable[..., Any], prompt: str, system: str) -> None:
        self.rows = rows
        self.reward = reward
        self.prompt = prompt
        self.system = system
        self.scorer()  # a reward that cannot be called by name is found where it is written

    @abstractmethod
    def session(self, name: str, origin: Origin) -> Environment:
        """A fresh session of the environment `name`."""

    def opening(self, row: Mapping[str, Any]) -> tuple[Message, ...]:
        """The messages that a row begins with. Raises ValueError."""
        return opening_messages(row, self.prompt, self.system)

    def scorer(self) -> Scorer:
        """What grades the episodes, in its own process."""
        return RewardScorer(self.reward, opening=self.opening)

    def environment_kind(self, origin: Origin) -> EnvironmentKind:
        """See `Door`."""
        name = origin.target.rpartition(":")[2]

        def build(args: dict[str, Any]) -> Environment:
            refuse_args(args, name)
            return self.session(name, origin)

        def check_row(row: Mapping[str, Any]) -> None:
            self.opening(row)
            RewardScorer(self.reward).check_columns(row)

        return EnvironmentKind(
            environment=build,
            tasks=None if self.rows is None else row_tasks(self.rows, origin, name, check_row),
            scorer=ScorerConfig(kind=origin.target),
            check_row=check_row,
        )


def row_tasks(
    rows: Any, origin: Origin, name: str, check_row: Callable[[Mapping[str, Any]], None]
) -> Callable[[str, int, dict[str, Any]], TaskSource]:
    """`EnvironmentKind.tasks` over rows.

    Args:
        rows: what `headrace.actors.tasks.rows_tasks` takes; paths are relative to the file of `origin`.
        name: the environment's.
        check_row: raises ConfigError or ValueError for a row that cannot be played. It sees the first of the split.
    """

    def tasks(split: str, seed: int, args: dict[str, Any]) -> TaskSource:
        from headrace.actors.tasks import rows_tasks

        refuse_args(args, name)
        source = rows_tasks(rows, split, seed, name, origin.file.parent)
        check_first(source, check_row, f"{origin.file.name}: {name}")
        return source

    return tasks


def check_first(source: TaskSource, check_row: Callable[[Mapping[str, Any]], None], where: str) -> None:
    """Try the first row of a source, which stays where it is. Raises ConfigError, which begins with `where`."""
    first = _first(source)
    try:
        check_row(first.data)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def refuse_args(args: Mapping[str, Any], name: str) -> None:
    """A door is configured where it is made. Raises ConfigError."""
    if args:
        raise ConfigError(f"environments.{name}.args: {name} takes no args, but {', '.join(args)} is given")


def _first(source: TaskSource) -> Task:
    """The first task that can be had; a generator may fail now and then. Raises what the source raises."""
    start = source.state
    try:
        for offset in range(_TRIED):
            source.restore(start + offset)
            try:
                (first,) = source.next(1)
                return first
            except ConfigError:
                if offset == _TRIED - 1:
                    raise
    finally:
        source.restore(start)
    raise ConfigError("the source of tasks has none")
