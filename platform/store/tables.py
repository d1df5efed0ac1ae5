"""The side tables of a run: rewards, fates and training receipts, which grow after an episode is written.

Each writer adds whole JSON lines to a file of its own, `FOLDER/WRITER.jsonl` (segments of it on an object store, see
`lines.py`), so that writers never meet. Readers put the files together and join by episode id. A line that a crash tore
is left out and counted; a line of a schema that this build does not know is refused.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, Generic, TypeVar

import msgspec

from headrace.platform.errors import SchemaError
from headrace.platform.records.tables import FateRow, Receipt, RewardRow
from headrace.platform.store.files import open_url
from headrace.platform.store.lines import LineWriter, line_files, read_files

Row = TypeVar("Row", RewardRow, FateRow, Receipt)
_SCHEMA_VERSION = 1
_Place = tuple[object, ...]


class SideTable(Generic[Row]):
    """One kind of row under one folder of a run root.

    Args:
        root_url: the run root.
        writer: the name of the file that `append` adds to; a table that is only read needs none.
    """

    folder: ClassVar[str]
    record: type[Row]

    def __init__(self, root_url: str, writer: str = "") -> None:
        self._fs, root = open_url(root_url)
        self._folder = f"{root}/{self.folder}"
        self._writer = LineWriter(self._fs, f"{self._folder}/{writer}.jsonl") if writer else None
        self._decoder: msgspec.json.Decoder[Row] = msgspec.json.Decoder(self.record)
        self.torn_lines = 0

    def append(self, rows: Sequence[Row]) -> None:
        """Add rows at the end; they are with the operating system, or the object store, on return.

        Raises:
            ValueError: for a table that was opened for reading only.
            DiskFull: the disk is.
        """
        if self._writer is None:
            raise ValueError(f"this {self.folder} table has no writer's name, so it can only be read")
        if rows:
            self._writer.append(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))

    def rows(self) -> list[Row]:
        """Every row of every writer, file by file, in the order written. Sets `torn_lines`.

        Raises:
            SchemaError: for a row that is JSON, but not a row of this table that this build reads.
        """
        self.torn_lines = 0
        files = line_files(self._fs, f"{self._folder}/*.jsonl")
        return [row for file, data in read_files(self._fs, files) for row in self.parsed(file, data)]

    def parsed(self, file: str, data: bytes) -> Iterator[Row]:
        """The rows of whole lines `data`, which stood in `file`. Counts torn ones and raises as `rows` does."""
        for number, line in enumerate(data.split(b"\n"), start=1):
            if not line:
                continue
            try:
                row = self._decoder.decode(line)
            except msgspec.ValidationError as error:
                raise SchemaError(f"{file}, line {number}: not a row of {self.folder}: {error}") from error
            except (msgspec.DecodeError, UnicodeDecodeError):
                self.torn_lines += 1
                continue
            if row.schema_version != _SCHEMA_VERSION:
                raise SchemaError(
                    f"{file}, line {number}: schema {row.schema_version}; this build reads {_SCHEMA_VERSION}"
                )
            yield row


class RewardTable(SideTable[RewardRow]):
    """Reward components by episode."""

    folder = "rewards"
    record = RewardRow

    def append(self, rows: Sequence[RewardRow]) -> None:
        """See `SideTable.append`. Rows of one call stand side by side, and are numbered where they share a place; those
        of a later call replace them, for whoever cannot know whether he has written writes again."""
        seen: Counter[_Place] = Counter()
        numbered = []
        for row in rows:
            place = (*_place(row), row.grader_version)
            numbered.append(row if row.number == seen[place] else msgspec.structs.replace(row, number=seen[place]))
            seen[place] += 1
        super().append(numbered)

    def by_episode(self) -> dict[str, list[RewardRow]]:
        """The rows that count: all that a grader gave at a place when it was last written, unless superseded."""
        return _grouped(counting_rows(self.rows()))


class FateTable(SideTable[FateRow]):
    """What became of each attempt."""

    folder = "fates"
    record = FateRow

    def by_episode(self) -> dict[str, FateRow]:
        """The last row of each attempt: after a rollback an attempt is in flight once more (P6)."""
        return {row.episode_id: row for row in self.rows()}


class ReceiptTable(SideTable[Receipt]):
    """How each episode was trained on."""

    folder = "receipts"
    record = Receipt

    def by_episode(self) -> dict[str, list[Receipt]]:
        """Every receipt; several where a rollback made the learner train on an episode again."""
        return _grouped(self.rows())


def counting_rows(rows: Iterable[RewardRow]) -> list[RewardRow]:
    """Of rows in the order written those that count: all that a grader gave at a place when it was last written, unless
    superseded."""
    latest: dict[_Place, list[RewardRow]] = defaultdict(list)
    replaced: set[_Place] = set()
    for row in rows:
        place = _place(row)
        latest[(*place, row.grader_version)][row.number :] = [row]
        if row.supersedes:
            replaced.add((*place, row.supersedes))
    return [row for key, some in latest.items() if key not in replaced for row in some]


def _place(row: RewardRow) -> _Place:
    return row.episode_id, row.kind, row.turn, row.span


def _grouped(rows: Sequence[Row]) -> dict[str, list[Row]]:
    grouped: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        grouped[row.episode_id].append(row)
    return dict(grouped)
