"""Processes of a box, seen from outside: who descends from whom, what they use."""

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICK_S = 0.001
_SHARED_MEMORY = ("/dev/zero (deleted)",)
_CALM = 4
_CHUNK = 1 << 16
_START = 19


class Process(NamedTuple):
    """One process, told from a later one of the same number by when it began, in ticks since the machine did."""

    pid: int
    start: int


def descendants(pid: int) -> list[int]:
    """The processes below `pid`, itself left out; those nearest to it first."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        children = _children(waiting.pop(0))
        found += children
        waiting += children
    return found


def _children(pid: int) -> list[int]:
    children: list[int] = []
    for task in _listed(f"/proc/{pid}/task"):
        children += map(int, _said(f"/proc/{pid}/task/{task}/children").split())
    return children


def memory_bytes(pids: Iterable[int]) -> int:
    """Resident memory that is each one's own; programs and files that they share are not counted."""
    pages = 0
    for pid in pids:
        with contextlib.suppress(ValueError):
            _, resident, shared, *_ = map(int, _said(f"/proc/{pid}/statm").split())
            pages += resident - shared
    return pages * _PAGE


def unlinked_bytes(pids: Iterable[int]) -> int:
    """What files take that have no name any more, and that the processes hold open or have in their memory."""
    seen: dict[tuple[int, int], int] = {}
    for pid in pids:
        # A thread may have descriptors of its own, and outlive the first one.
        tasks = [f"/proc/{pid}/task/{task}" for task in _listed(f"/proc/{pid}/task")]
        mapped = next(filter(None, map(_unlinked_maps, tasks)), [])
        for file in [f"{task}/fd/{number}" for task in tasks for number in _listed(f"{task}/fd")] + mapped:
            with contextlib.suppress(OSError):
                found = os.stat(file)  # noqa: PTH116 - a look is at every descriptor of every box
                if found.st_nlink == 0 and found.st_blocks:
                    seen[found.st_dev, found.st_ino] = found.st_blocks * 512
    return sum(seen.values())


def _unlinked_maps(task: str) -> list[str]:
    """Where the files without a name that a thread has in its memory can be looked at, each once. Memory that processes
    share looks like one too, but is held by the limit on memory."""
    said = _said(f"{task}/maps")
    if b" (deleted)" not in said:
        return []
    files: dict[tuple[str, str], str] = {}
    for line in said.decode(errors="replace").splitlines():
        if line.endswith(" (deleted)"):
            place, _, _, device, inode, name = line.split(maxsplit=5)
            if name not in _SHARED_MEMORY:
                start, end = (part.lstrip("0") or "0" for part in place.split("-"))
                files[device, inode] = f"/proc/{task.rpartition('/')[2]}/map_files/{start}-{end}"
    return list(files.values())


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 - see above
    except OSError:
        return []


def _said(path: str) -> bytes:
    """What a file of /proc says; nothing when its process has ended."""
    found = []
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        while part := os.read(file, _CHUNK):
            found.append(part)
    except OSError:
        return b""
    finally:
        os.close(file)
    return b"".join(found)


def marked(marker: str) -> list[int]:
    """Processes of this user that began with `marker` (NAME=value) in their environment."""
    found = []
    wanted = os.fsencode(marker)
    for path in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if path.name.isdigit() and wanted in (path / "environ").read_bytes().split(b"\0"):
                found.append(int(path.name))
    return found


def living(pid: int) -> frozenset[Process]:
    """What runs below `pid`."""
    return frozenset(one for below in descendants(pid) if (one := process_of(below)) is not None)


def end_below(
    pid: int, deadline_s: float, but: frozenset[Process] = frozenset(), alone: frozenset[Process] = frozenset()
) -> bool:
    """Kill what descends from `pid`, except `but` with all below them, and `alone` without; whether that was all. They
    are stopped first, so that none begins another. Blocks."""
    began = time.monotonic()
    for number, until in ((signal.SIGSTOP, began + deadline_s / 2), (signal.SIGKILL, began + deadline_s)):
        known: frozenset[Process] = frozenset()
        calm = 0
        while calm < _CALM and time.monotonic() < until:
            left = _besides(pid, but, alone)
            # One that begins another and ends is between two looks: all must stand still for several.
            still = number == signal.SIGSTOP and left <= known and all(_stands_still(one.pid) for one in left)
            calm = calm + 1 if still or not left else 0
            for below in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(below.pid, number)
            known |= left
            if left:
                time.sleep(_TICK_S)
    return not _besides(pid, but, alone)


def _besides(pid: int, but: frozenset[Process], alone: frozenset[Process]) -> frozenset[Process]:
    found: set[Process] = set()
    waiting = [pid]
    while waiting:
        for child in _children(waiting.pop()):
            process = process_of(child)
            if process is None or process in alone or process not in but:
                waiting.append(child)
                if process is not None and process not in alone:
                    found.add(process)
    return frozenset(found)


def _stands_still(pid: int) -> bool:
    return _said(f"/proc/{pid}/stat").rpartition(b")")[2].split()[:1] in ([b"T"], [b"t"], [b"Z"], [])


def process_of(pid: int) -> Process | None:
    """The process of that number; None when it has ended."""
    # Its name may hold anything; its first thread may have ended before the others.
    try:
        fields = _said(f"/proc/{pid}/stat").rpartition(b")")[2].split()
        if fields[0] == b"X" or (fields[0] == b"Z" and len(_listed(f"/proc/{pid}/task")) < 2):
            return None
        return Process(pid, int(fields[_START]))
    except IndexError:
        return None
