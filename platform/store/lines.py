"""Lines that are only ever added: one writer to a file, any number of readers.

On a local disk `NAME.jsonl` is appended to. An object cannot be appended to, so that elsewhere `NAME.jsonl` stands for
segments beside it, `NAME-NNNNNNNN-BOOT.jsonl`. The newest one is written anew, whole, with every append until it has
`SEGMENT_BYTES`; then the next one begins. So an append costs one request and never more than a segment; a reader sees
all of an append or nothing of it; and there are few objects to list and to read. Numbers go on over restarts, which
keeps the order; BOOT is drawn by each writer, so that two processes that bear one name, such as a worker and the one
that was started in its place, never write over each other.

Measured against moto: one request an append, where reading the object and writing it anew takes eight. A learner step
appends to receipts, fates and metrics once each, and to rewards once for each delivery.
"""

import re
import secrets
import threading
from collections.abc import Iterator
from typing import Any

from headrace.platform.store.files import append_lines, is_local, put

SEGMENT_BYTES = 1 << 18
_SEGMENT = re.compile(r"(.+)-(\d{8})-[0-9a-f]{8}\.jsonl")
_SUFFIX = ".jsonl"
_READ_AT_ONCE = 64


class LineWriter:
    """Adds to the lines at `path`, a file system's path that ends in `.jsonl`. Threads may share it."""

    def __init__(self, fs: Any, path: str) -> None:
        self._fs = fs
        self._path = path
        self._boot = secrets.token_hex(4)
        self._lock = threading.Lock()
        self._number = 0
        self._segment = b""

    def append(self, lines: bytes, durable: bool = False) -> None:
        """Add whole `lines`, which end in a newline. `durable` waits for a local disk; an object store is durable.

        Raises:
            DiskFull: the local disk is; nothing was added.
        """
        with self._lock:
            if is_local(self._fs):
                append_lines(self._fs, self._path, lines, durable)
                return
            if not self._number:
                self._number = self._last_number() + 1
            elif len(self._segment) >= SEGMENT_BYTES:
                self._number, self._segment = self._number + 1, b""
            grown = self._segment + lines
            file = f"{self._path.removesuffix(_SUFFIX)}-{self._number:08d}-{self._boot}{_SUFFIX}"
            put(self._fs, file, grown)
            self._segment = grown

    def _last_number(self) -> int:
        segments = (_SEGMENT.fullmatch(file) for file in line_files(self._fs, self._path))
        return max((int(found[2]) for found in segments if found), default=0)


def line_files(fs: Any, path: str) -> list[str]:
    """The files that hold the lines at `path`, oldest first; none where nothing was written. `FOLDER/*.jsonl` stands
    for those of every writer."""
    fs.invalidate_cache()  # other processes write too
    wanted = path.removesuffix(_SUFFIX)
    files = [str(file) for file in fs.glob(f"{wanted}*{_SUFFIX}" if not wanted.endswith("*") else path)]
    plain_is_last = is_local(fs)  # in a root that was copied from, or to, an object store and went on there

    def place(file: str) -> tuple[str, bool, str]:
        found = _SEGMENT.fullmatch(file)
        return (found[1], not plain_is_last, file) if found else (file.removesuffix(_SUFFIX), plain_is_last, file)

    return sorted((file for file in files if wanted.endswith("*") or place(file)[0] == wanted), key=place)


def read_files(fs: Any, files: list[str]) -> Iterator[tuple[str, bytes]]:
    """Each file with its bytes, in order; many at once, where the file system can."""
    for start in range(0, len(files), _READ_AT_ONCE):
        some = files[start : start + _READ_AT_ONCE]
        yield from zip(some, map(bytes, fs.cat_ranges(some, None, None, on_error="raise")), strict=True)
