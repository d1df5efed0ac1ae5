"""What both doors do with their rows: make tasks of them, and find a wrong column before anything starts."""

from collections.abc import Callable, Mapping
from typing import Any

from headrace.actors.environments.kind import Origin
from headrace.platform.contracts import TaskSource
from headrace.platform.errors import ConfigError


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
    start = source.state
    (first,) = source.next(1)
    source.restore(start)
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
