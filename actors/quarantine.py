"""Tasks that are played no more, because their world is broken and no policy can do anything about it.

Every process of a run has the same `Quarantine`: whoever finds a task broken tells the driver, which writes it down in
`quarantine.jsonl` of the run root and tells all workers; on a resume it reads them again. A training group that would
play such a task plays the next one that is not out (`first_not_out`). Tasks of an evaluation are never replaced, for
then two evaluations would not compare; they are only reported.

Who is put in is decided in `task_judge.py`. Owns no clock and no connection.
"""

from collections.abc import Collection, Iterable, Mapping

import msgspec

from headrace.platform.errors import RunFailed, SchemaError
from headrace.platform.records.message import Task
from headrace.platform.store.files import open_url
from headrace.platform.store.lines import LineWriter, line_files, read_files

FILE = "quarantine.jsonl"
SCHEMA_VERSION = 1
CANDIDATES = 64
"""Tasks that are looked at for one group, at most: a worker does not look for ever where everything is out."""

TaskKey = tuple[str, str, str]
"""Environment as the recipe knows it, task id and task version: a task that was mended has another version."""


class QuarantinedTask(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A task that is out: why, and the episode that brought it there. Travels between processes, and is a line of the
    file.

    `environment` is the recipe's name of it, `environment_name` and `environment_version` what the world calls itself.
    """

    schema_version: int = msgspec.field(default_factory=lambda: SCHEMA_VERSION)
    environment: str
    task_id: str
    task_version: str = "1"
    split: str = "train"
    environment_name: str = ""
    environment_version: str = ""
    reason: str
    episode_id: str = ""

    @property
    def key(self) -> TaskKey:
        """What `Quarantine` knows it by."""
        return self.environment, self.task_id, self.task_version


def task_key(environment: str, task: Task) -> TaskKey:
    """What a task is known by."""
    return environment, task.task_id, task.version


class Quarantine:
    """The tasks of a run that are out. May be asked from several threads."""

    def __init__(self) -> None:
        self._out: dict[TaskKey, QuarantinedTask] = {}

    def observe(self, rows: Iterable[QuarantinedTask]) -> list[QuarantinedTask]:
        """Take note of tasks that are out; those of them that were not known. The first reason of a task counts."""
        fresh = []
        for row in rows:
            if row.key not in self._out:
                self._out[row.key] = row
                fresh.append(row)
        return fresh

    def is_out(self, environment: str, task: Task) -> bool:
        """Whether no training group plays this task any more."""
        return task_key(environment, task) in self._out

    def rows(self) -> list[QuarantinedTask]:
        """All that are out, in the order in which they were told."""
        return list(self._out.values())


def first_not_out(quarantine: Quarantine, environment: str, candidates: Iterable[Task]) -> Task:
    """The first of `candidates` that may be played.

    Args:
        quarantine: the run's.
        environment: as the recipe knows it.
        candidates: the group's own task first, then others at positions that follow from the group's number, so that
            every worker with the same quarantine plays the same (P1). At most `CANDIDATES` are taken.

    Raises:
        RunFailed: all are out; nothing can go on (case E8).
    """
    example: Task | None = None
    for _, task in zip(range(CANDIDATES), candidates, strict=False):
        if not quarantine.is_out(environment, task):
            return task
        example = example or task
    why = ""
    if example is not None:
        key = task_key(environment, example)
        why = next((f"; {row.task_id}: {row.reason}" for row in quarantine.rows() if row.key == key), "")
    raise RunFailed(
        f"every task of {environment} that was looked at is quarantined, {len(quarantine.rows())} in all{why}"
    )


class QuarantineFile:
    """`quarantine.jsonl` of a run root, one task a line. Written by the driver alone."""

    def __init__(self, root_url: str) -> None:
        self._fs, root = open_url(root_url)
        self._path = f"{root}/{FILE}"
        self._writer = LineWriter(self._fs, self._path)

    def append(self, rows: Iterable[QuarantinedTask]) -> None:
        """Write tasks down; durable on return. Raises DiskFull."""
        if lines := b"".join(msgspec.json.encode(row) + b"\n" for row in rows):
            self._writer.append(lines, durable=True)

    def read(self, versions: Mapping[str, Collection[str]] | None = None) -> list[QuarantinedTask]:
        """All of them, in order; a line that a crash tore is left out.

        Args:
            versions: environment versions by the environment's own name, as a recipe plays them now. Tasks that other
                versions of these environments broke are left out: whoever mends a world gives it a new version.

        Raises:
            SchemaError: for a line of a schema that this build does not read.
        """
        rows = []
        for _, data in read_files(self._fs, line_files(self._fs, self._path)):
            for line in data.split(b"\n"):
                try:
                    row = msgspec.json.decode(line, type=QuarantinedTask)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    continue
                if row.schema_version != SCHEMA_VERSION:
                    raise SchemaError(f"{self._path}: schema {row.schema_version}; this build reads {SCHEMA_VERSION}")
                known = (versions or {}).get(row.environment_name)
                if known is None or row.environment_version in known:
                    rows.append(row)
        return rows
