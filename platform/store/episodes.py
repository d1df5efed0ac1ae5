"""The episode store: Parquet files that are written once and never changed.

Owns `episodes/version=NNNNNN/` of a run root. A file appears whole or not at all; the path that `write` returns names
it for ever, also after `compact` has merged it: whoever reads by path is led to the merged file (P9). Which episodes
belong to a lineage, and what they are worth, is not decided here.
"""

import hashlib
import re
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from headrace.platform.errors import NotFound
from headrace.platform.records.codec import episode_codec
from headrace.platform.records.episode import Episode
from headrace.platform.store.columns import SCHEMA, to_table
from headrace.platform.store.files import open_url, write_atomic

_WORKER = re.compile(r"[A-Za-z0-9_-]+")
_CANDIDATES_SHOWN = 8


class EpisodeStore:
    """The episodes of one run root.

    Any number of processes may write and read at once. At most one may `compact` a version at a time; an `iterate` or
    `find` that it overtakes raises FileNotFoundError and may be started again.
    """

    def __init__(self, root_url: str) -> None:
        self._fs, self._root = open_url(root_url)
        self._boot = secrets.token_hex(4)  # a restarted worker counts from zero again
        self._written: Counter[str] = Counter()

    def write(self, episodes: Sequence[tuple[Episode, bytes]], worker: str) -> str:
        """Store episodes with their encoded forms in one file, durable on return; its path relative to the root.

        The file lies in the folder of the oldest policy version among them.

        Raises:
            ValueError: for no episodes, or a worker name that cannot be part of a file name.
        """
        if not episodes:
            raise ValueError("nothing to store: an empty file would only be in the way")
        oldest = min(episode.version.number for episode, _ in episodes)
        return self._store(to_table(episodes), oldest, worker)

    def read(self, file: str, episode_ids: Sequence[str]) -> list[bytes]:
        """The payloads of these episodes of `file`, in the order asked for, each exactly as it was put.

        Raises:
            NotFound: when the file, or the file that it was merged into, lacks one of them.
        """
        try:
            found = self._payloads([f"{self._root}/{file}"], episode_ids)
        except FileNotFoundError:
            found = self._payloads(self._files(file.rsplit("/", 1)[0]), episode_ids)
        if missing := sorted(set(episode_ids) - found.keys()):
            raise NotFound(f"{file} does not hold {', '.join(missing[:_CANDIDATES_SHOWN])}")
        return [found[episode_id] for episode_id in episode_ids]

    def find(self, prefix: str) -> Episode:
        """The episode whose id is `prefix`, or the only one whose id begins with it, with or without the run's name.

        Raises:
            NotFound: for none, or for several: then it lists some.
        """
        ids: set[str] = set()
        for batch in self._scan(self._files(), None, ["episode_id"]):
            ids.update(batch["episode_id"].to_pylist())
        matches = sorted(i for i in ids if i.startswith(prefix) or _without_run(i).startswith(prefix))
        exact = [i for i in matches if prefix in (i, _without_run(i))]
        chosen = exact if len(exact) == 1 else matches
        if len(chosen) != 1:
            raise NotFound(_not_unique(prefix, chosen, ids))
        return next(self.iterate({"episode_id": chosen[0]}))

    def iterate(self, where: Mapping[str, Any] | None = None) -> Iterator[Episode]:
        """Every stored episode once, oldest policy version first; `where` maps columns to the value they must have.

        Raises:
            ValueError: for a column that does not exist.
        """
        condition: ds.Expression | None = None
        for name, value in (where or {}).items():
            if name not in SCHEMA.names:
                near = get_close_matches(name, SCHEMA.names, n=1)
                raise ValueError(f"episodes have no column {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
            term = ds.field(name) == value
            condition = term if condition is None else condition & term
        seen: set[tuple[str, bytes]] = set()
        for batch in self._scan(self._files(), condition):
            for row in _unseen(batch, seen):
                yield episode_codec.decode(batch["payload"][row].as_py())

    def compact(self, version: int) -> str | None:
        """Merge the files of a policy version into one; its path, or None where there are fewer than two.

        Payload bytes stay as they are. A crash between the new file and the removal of the old ones leaves rows
        twice; readers show them once and the next `compact` removes them.
        """
        files = self._files(_folder(version))
        if len(files) < 2:
            return None
        seen: set[tuple[str, bytes]] = set()
        tables = []
        for file in files:
            with self._fs.open(file, "rb") as handle:
                table = pq.read_table(handle, schema=SCHEMA)
            tables.append(table.take(pa.array(_unseen(table, seen), pa.int64())))
        merged = self._store(pa.concat_tables(tables), version, "compact")
        for file in files:
            self._fs.rm_file(file)
        return merged

    def _store(self, table: pa.Table, version: int, worker: str) -> str:
        if not _WORKER.fullmatch(worker):
            raise ValueError(f"a worker's name is made of letters, digits, - and _, not {worker!r}")
        self._written[worker] += 1
        file = f"{_folder(version)}/{worker}-{self._boot}-{self._written[worker]:06d}.parquet"
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd")
        write_atomic(self._fs, f"{self._root}/{file}", sink.getvalue().to_pybytes())
        return file

    def _payloads(self, files: Sequence[str], episode_ids: Sequence[str]) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for batch in self._scan(files, ds.field("episode_id").isin(list(episode_ids))):
            found.update(zip(batch["episode_id"].to_pylist(), batch["payload"].to_pylist(), strict=True))
        return found

    def _files(self, folder: str = "episodes") -> list[str]:
        self._fs.invalidate_cache()  # other processes write too
        pattern = "*.parquet" if folder != "episodes" else "version=*/*.parquet"
        return sorted(self._fs.glob(f"{self._root}/{folder}/{pattern}"))

    def _scan(
        self, files: Sequence[str], where: ds.Expression | None, columns: Sequence[str] = ("episode_id", "payload")
    ) -> Iterator[pa.RecordBatch]:
        if files:
            dataset = ds.dataset(list(files), schema=SCHEMA, format="parquet", filesystem=self._fs)
            yield from dataset.to_batches(columns=list(columns), filter=where, use_threads=False)


def _folder(version: int) -> str:
    return f"episodes/version={version:06d}"


def _without_run(episode_id: str) -> str:
    return ".".join(episode_id.rsplit(".", 3)[1:])


def _unseen(rows: pa.Table | pa.RecordBatch, seen: set[tuple[str, bytes]]) -> list[int]:
    """The rows that are not in `seen`, which then holds them. The same id with other bytes is another row (P2)."""
    fresh = []
    for row, (episode_id, payload) in enumerate(
        zip(rows["episode_id"].to_pylist(), rows["payload"].to_pylist(), strict=True)
    ):
        mark = (episode_id, hashlib.sha256(payload).digest())
        if mark not in seen:
            seen.add(mark)
            fresh.append(row)
    return fresh


def _not_unique(prefix: str, matches: Sequence[str], ids: set[str]) -> str:
    if matches:
        more = f" and {len(matches) - _CANDIDATES_SHOWN} more" if len(matches) > _CANDIDATES_SHOWN else ""
        return f"{prefix!r} fits {len(matches)} episodes: {', '.join(matches[:_CANDIDATES_SHOWN])}{more}"
    near = get_close_matches(prefix, sorted(ids), n=_CANDIDATES_SHOWN) or sorted(ids)[:_CANDIDATES_SHOWN]
    return f"no episode {prefix!r}" + (f"; there are {', '.join(near)}" if near else "; none is stored yet")
