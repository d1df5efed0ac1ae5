"""Reads files and data sets into `Rows`: JSON lines, Parquet, folders of both, and data sets saved by `datasets`.

What one process has read it does not read again, as long as the files stay as they are. Tables are read in slices,
column by column, so that never more than one slice of a large file exists in two forms.
"""

import functools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.actors.tasks.rows import Rows
from headrace.platform.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa

_log = logging.getLogger(__name__)
_SLICE_ROWS = 4096
_DATASET_MARKS = ("dataset_dict.json", "state.json")
_SPLIT_NAMES = {
    "train": "train",
    "training": "train",
    "dev": "dev",
    "validation": "dev",
    "valid": "dev",
    "hidden": "hidden",
    "test": "hidden",
}

Parts = dict[str, Rows]
"""Rows by split; under the empty name where the source says nothing about splits."""


def read_path(path: Path, limit: int = 0) -> Parts:
    """The rows of a file or folder, the first `limit` of each part only unless that is 0.

    Raises:
        ConfigError: it does not exist, is of no known kind, is empty, or holds a row that cannot be used; the message
            names file and row.
    """
    if not path.exists():
        near = get_close_matches(path.name, _names(path.parent), n=1)
        raise ConfigError(f"{path} does not exist" + (f"; did you mean {path.parent / near[0]}?" if near else ""))
    if path.is_dir() and any((path / mark).exists() for mark in _DATASET_MARKS):
        return _read_saved(path, _stamps(path.rglob("*.*")), limit)
    files = _files_of(path)
    return {"": _read_files(tuple(files), _stamps(files), limit)}


def read_given(rows: Iterable[object], limit: int = 0) -> Rows:
    """Rows that are there already, as mappings. Raises ConfigError."""
    return _collected([("rows", enumerate(rows, 1), False)], limit)


def read_dataset(dataset: Any, name: str = "dataset", limit: int = 0) -> Parts:
    """The rows of a `datasets.Dataset` or `DatasetDict`, whose splits are taken over. Raises ConfigError."""
    if not isinstance(dataset, Mapping):
        return {"": _collected([(name, _dataset_rows(dataset), False)], limit)}
    parts: Parts = {}
    for theirs, part in dataset.items():
        if theirs not in _SPLIT_NAMES:
            raise ConfigError(f"{name} has the split {theirs!r}; known: {', '.join(_SPLIT_NAMES)}. Rename or remove it")
        ours = _SPLIT_NAMES[theirs]
        if ours in parts:
            raise ConfigError(f"{name} has two splits that mean {ours!r}; keep one of them")
        parts[ours] = _collected([(f"{name}[{theirs}]", _dataset_rows(part), False)], limit)
    if "train" not in parts:
        raise ConfigError(f"{name} has no split 'train', only {', '.join(dataset) or 'none at all'}")
    return parts


# --- files ------------------------------------------------------------------------------------------------------------


def _names(folder: Path) -> list[str]:
    return [each.name for each in folder.iterdir()] if folder.is_dir() else []


def _files_of(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(each for each in path.iterdir() if each.suffix in _READERS and not each.name.startswith("."))
        if not files:
            raise ConfigError(
                f"{path} holds no {' or '.join(_READERS)} file, and no data set that `datasets` has saved"
            )
        return files
    if path.suffix not in _READERS:
        raise ConfigError(f"{path} is of no known kind; a source of rows ends in {' or '.join(_READERS)}")
    return [path]


def _stamps(files: Iterable[Path]) -> tuple[tuple[str, int, int], ...]:
    """What tells whether files have changed."""
    stats = ((str(file), file.stat()) for file in files)
    return tuple(sorted((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats))


@functools.lru_cache(maxsize=8)
def _read_files(files: tuple[Path, ...], _stamps: tuple[object, ...], limit: int) -> Rows:
    numbered = [(str(file), _READERS[file.suffix](file), file.suffix == ".jsonl") for file in files]
    return _collected(numbered, limit)


@functools.lru_cache(maxsize=8)
def _read_saved(path: Path, _stamps: tuple[object, ...], limit: int) -> Parts:
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"{path} is a data set of the package `datasets`, which is not installed: pip install 'headrace[datasets]'"
        ) from None
    try:
        found = datasets.load_from_disk(os.fspath(path))
    except Exception as error:  # whatever a broken folder makes the library raise
        raise ConfigError(f"{path}: `datasets` cannot load it: {type(error).__name__}: {error}") from error
    return read_dataset(found, str(path), limit)


def _collected(files: Sequence[tuple[str, Iterable[tuple[int, object]], bool]], limit: int) -> Rows:
    """All rows of `(file, numbered rows, whether they are plain)`, in order."""
    rows = Rows()
    for file, numbered, is_plain in files:
        before = len(rows)
        rows.begin(file)
        for line, row in numbered:
            if limit and len(rows) >= limit:
                return rows.close()
            rows.add(row, line, is_plain=is_plain)
        if len(rows) == before and not rows.repeated:
            raise ConfigError(f"{file}: there are no rows")
    if rows.repeated:
        names = ", ".join(file for file, _, _ in files)
        _log.warning("%s: %d rows are there more than once and count as one each", names, rows.repeated)
    return rows.close()


def _json_lines(file: Path) -> Iterator[tuple[int, object]]:
    decode = msgspec.json.Decoder().decode
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if not text.strip():
                continue
            try:
                row = decode(text)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise ConfigError(f"{file}:{number}: not a JSON object: {error}") from None
            yield number, row


def _parquet(file: Path) -> Iterator[tuple[int, object]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as table:
            yield from _numbered(table.iter_batches(batch_size=_SLICE_ROWS))
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{file} cannot be read as Parquet: {error}") from None


def _dataset_rows(dataset: Any) -> Iterator[tuple[int, object]]:
    return _numbered(dataset.with_format("arrow").iter(batch_size=_SLICE_ROWS))


def _numbered(slices: "Iterable[pa.RecordBatch | pa.Table]") -> Iterator[tuple[int, object]]:
    number = 0
    for part in slices:
        for row in part.to_pylist():
            number += 1
            yield number, row


_READERS: dict[str, Callable[[Path], Iterator[tuple[int, object]]]] = {".jsonl": _json_lines, ".parquet": _parquet}
