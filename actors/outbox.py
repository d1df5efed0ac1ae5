"""The outbox: puts that the server may still lose, on this host's disk (P11).

Owns one folder of one worker. A submission enters it, without its payload (the episode store has that, P9), before it
is put, and leaves it once the server has confirmed that it will not forget it. The worker that follows finds what is
left and puts it again. Nothing is rewritten: files of JSON lines only grow, each for about a second, and a file is
removed when all that it holds may leave.

When that is the case is decided in `confirmation.py`.
"""

import logging
import os
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headrace.platform.records.delivery import Submission
from headrace.platform.store.files import write_all
from headrace.platform.store.full_disk import named_when_full

_log = logging.getLogger(__name__)
_SUFFIX = ".jsonl"


@dataclass(slots=True, eq=False)
class Entry:
    """A submission in the outbox; `answered_s` is when the server answered its put, None while it has not."""

    submission: Submission
    answered_s: float | None = None


class Outbox:
    """The submissions of one worker that are not known to be safe. May be used from several threads.

    `torn` counts lines of earlier processes that could not be read: a process that died while it wrote one had not
    put it, so that nothing but its own attempt is lost.

    Args:
        folder: made when missing; no other living worker uses it.
        run: the run's name; what another run left is passed over.

    Raises:
        OSError: the folder cannot be read or written, here and in `add` and `forget`.
    """

    def __init__(self, folder: Path, run: str) -> None:
        self._folder = folder
        self._run = run
        self._boot = secrets.token_hex(4)
        self._lock = threading.Lock()
        self._segments: dict[Path, list[Entry]] = {}
        self._count = 0
        self._path: Path | None = None  # the file that grows
        self.torn = 0
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.glob(f"*{_SUFFIX}")):
            self._segments[path] = self._read(path)
        if self.torn:
            _log.warning("the outbox %s had %d torn lines, which were passed over", folder, self.torn)

    def __len__(self) -> int:
        # Without the lock, which may be held while the disk is waited for: the copy is one step of the interpreter.
        return sum(len(entries) for entries in list(self._segments.values()))

    def entries(self) -> list[Entry]:
        """All that is in the outbox, an earlier process's first."""
        with self._lock:
            return [entry for entries in self._segments.values() for entry in entries]

    def add(self, submissions: Sequence[Submission]) -> list[Entry]:
        """Write submissions down; they are durable on return. Raises DiskFull (P23)."""
        entries = [Entry(msgspec.structs.replace(each, payload=b"")) for each in submissions]
        lines = b"".join(msgspec.json.encode(entry.submission) + b"\n" for entry in entries)
        with self._lock, named_when_full(self._folder):
            path = self._path or self._begin()
            try:
                with path.open("ab", buffering=0) as file:
                    write_all(file, lines)
                    os.fsync(file.fileno())
            except OSError:
                self._path = None  # what is torn stays the end of its file
                raise
            self._segments[path] += entries
        return entries

    def forget(self, answered_before_s: float) -> None:
        """Remove the files whose entries were all answered before that time."""
        with self._lock:
            if self._path is not None and self._segments[self._path]:
                self._path = None
            for path, entries in list(self._segments.items()):
                if path != self._path and all(_answered_before(entry, answered_before_s) for entry in entries):
                    path.unlink(missing_ok=True)
                    del self._segments[path]

    def _begin(self) -> Path:
        self._count += 1
        path = self._path = self._folder / f"{self._boot}-{self._count:06d}{_SUFFIX}"
        path.touch(exist_ok=False)
        _sync(self._folder)
        self._segments[path] = []
        return path

    def _read(self, path: Path) -> list[Entry]:
        entries = []
        for line in filter(None, path.read_bytes().split(b"\n")):
            try:
                submission = msgspec.json.decode(line, type=Submission)
            except msgspec.DecodeError:
                self.torn += 1
                continue
            if submission.attempt_id.run == self._run:
                entries.append(Entry(submission))
        return entries


def _answered_before(entry: Entry, before_s: float) -> bool:
    return entry.answered_s is not None and entry.answered_s <= before_s


def _sync(folder: Path) -> None:
    """A file's name is durable when its folder is."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
