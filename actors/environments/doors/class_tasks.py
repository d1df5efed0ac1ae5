"""The tasks that an environment class brings: what its `tasks(split, seed, **args)` gives, compared between the splits.

A class that ignores `split` would be evaluated on what it was trained on (case V2), so every split is asked for: rows
are compared by content and seed, Tasks by id, content and seed, and of a `TaskSource` the first 64 tasks by id and
seed. A split that cannot be had is left out until somebody asks for it.
"""

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from itertools import islice
from typing import Any

from headrace.actors.environments.kind import Origin
from headrace.actors.frames import defined_at, described
from headrace.actors.tasks import rows_tasks
from headrace.actors.tasks.finite import FiniteTasks, GivenTasks
from headrace.actors.tasks.opening import refuse_columns
from headrace.actors.tasks.rows import content_digest
from headrace.actors.tasks.splits import check_apart
from headrace.platform.config.tasks import SPLITS
from headrace.platform.contracts import TaskSource
from headrace.platform.errors import ConfigError
from headrace.platform.records.message import Task

_MOST_ROWS = 1_000_000
_COMPARED = 64


def class_tasks(cls: Any, split: str, seed: int, args: Mapping[str, Any], origin: Origin) -> TaskSource:
    """The tasks of one split.

    Raises:
        ConfigError: `tasks` raised, returned something else or nothing, or gives two splits the same task; names the
            file and line, and in the last case the task.
    """
    where = f"{defined_at(cls)}: {cls.__name__}.tasks"
    sources = {split: _source(cls, split, seed, args, origin, where)}
    for other in SPLITS:
        if other != split:
            with contextlib.suppress(ConfigError):
                sources[other] = _source(cls, other, seed, args, origin, where)
    try:
        check_apart({name: each.part for name, each in sources.items() if isinstance(each, FiniteTasks)})
        _check_tasks({name: each for name, each in sources.items() if not isinstance(each, FiniteTasks)}, split)
    except ConfigError as error:
        raise ConfigError(
            f"{where}: {error}. Does tasks(split, seed) use its split? Where worlds differ by their seed alone, give"
            " each row a `seed` that no other split has"
        ) from None
    return sources[split]


def _source(cls: Any, split: str, seed: int, args: Mapping[str, Any], origin: Origin, where: str) -> TaskSource:
    """What `tasks` returned, as a `TaskSource`."""
    try:
        given = cls.tasks(split, seed, **args)
        rows = list(islice(given, _MOST_ROWS + 1)) if isinstance(given, list | tuple | Iterator) else None
    except (Exception, SystemExit) as error:  # foreign code: the message names its file and line
        raise ConfigError(described(error)) from error
    if rows is None:
        refuse_columns(given, f"{where}: the rows")
        if not all(hasattr(given, each) for each in ("next", "restore", "state", "split")):
            found = "None" if given is None else type(given).__name__
            raise ConfigError(f"{where} returned {found}; expected a TaskSource, or a list of rows or Tasks")
        source: TaskSource = given
        return source
    if not rows:
        raise ConfigError(f"{where} gave no rows for the split {split!r}")
    if len(rows) > _MOST_ROWS:
        raise ConfigError(f"{where} gave more than {_MOST_ROWS} rows for {split!r}; return a TaskSource instead")
    name = origin.target.rpartition(":")[2]
    try:
        return rows_tasks(rows, split, seed, name, origin.file.parent, whole=True)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _check_tasks(sources: Mapping[str, TaskSource], asked: str) -> None:
    """Refuse a task of two splits, and a seed of two."""
    marks: tuple[tuple[str, Callable[[Task, bool], Hashable]], ...] = (
        ("the id", lambda task, _: task.task_id),
        ("the seed", lambda task, _: task.seed or None),
        ("the data", lambda task, is_given: (task.seed, content_digest(task.data)) if is_given and task.data else None),
    )
    owners: dict[tuple[str, Hashable], tuple[str, Task]] = {}
    for split, source in sources.items():
        for task in _first(source, split == asked):
            for name, mark in marks:
                value = mark(task, isinstance(source, GivenTasks))
                other, twin = owners.setdefault((name, value), (split, task))
                if value is not None and other != split:
                    raise ConfigError(
                        f"task {task.task_id!r} of {split} has {name} of task {twin.task_id!r} of {other}"
                        f" ({task.data!r:.120}, seed {task.seed}): evaluation must not see what was trained on"
                    )


def _first(source: TaskSource, must: bool) -> list[Task]:
    """All tasks of a list, the first few of another source, which stays where it is."""
    try:
        start = source.state
        tasks = list(source.next(len(source) if isinstance(source, GivenTasks) else _COMPARED))
        source.restore(start)
    except Exception as error:  # foreign code
        if must:
            raise ConfigError(described(error)) from error
        return []
    return tasks
