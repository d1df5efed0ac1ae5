"""Processes of a box, seen from outside: who descends from whom, what they use."""

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICK_S = 0.005
_SHARED_MEMORY = ("/dev/zero (deleted)",)
_CALM = 4
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
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                children += map(int, (task / "children").read_text().split())
    return children


def memory_bytes(pids: Iterable[int]) -> int:
    """Resident memory that is each one's own; programs and files that they share are not counted."""
    pages = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError):
            _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
            pages += resident - shared
    return pages * _PAGE


def unlinked_bytes(pids: Iterable[int]) -> int:
    """What files take that have no name any more, and that the processes hold open or have in their memory."""
    seen: dict[tuple[int, int], int] = {}
    for pid in pids:
        # A thread may have descriptors of its own, and outlive the first one.
        tasks = _entries(f"/proc/{pid}/task")
        mapped = next(filter(None, map(_unlinked_maps, tasks)), [])
        for file in [file for task in tasks for file in _entries(f"{task}/fd")] + mapped:
            with contextlib.suppress(OSError):
                found = file.stat()
                if found.st_nlink == 0 and found.st_blocks:
                    seen[found.st_dev, found.st_ino] = found.st_blocks * 512
    return sum(seen.values())


def _unlinked_maps(task: Path) -> list[Path]:
    """Where the files without a name that a thread has in its memory can be looked at, each once. Memory that processes
    share looks like one too, but is held by the limit on memory."""
    files: dict[tuple[str, str], Path] = {}
    with contextlib.suppress(OSError):
        for line in (task / "maps").read_text(errors="replace").splitlines():
            if line.endswith(" (deleted)"):
                place, _, _, device, inode, name = line.split(maxsplit=5)
                if name not in _SHARED_MEMORY:
                    start, end = (part.lstrip("0") or "0" for part in place.split("-"))
                    files[device, inode] = Path(f"/proc/{task.name}/map_files/{start}-{end}")
    return list(files.values())


def _entries(folder: str) -> list[Path]:
    try:
        return list(Path(folder).iterdir())
    except OSError:
        return []


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
    return frozenset(one for below in descendants(pid) if (one := _process(below)) is not None)


def end_below(
    pid: int, deadline_s: float, but: frozenset[Process] = frozenset(), alone: frozenset[Process] = frozenset()
) -> bool:
    """Kill what descends from `pid`, except `but` with all below them, and `alone` without; whether that was all. They
    are stopped first, so that none begins another. Blocks."""
    until = time.monotonic() + deadline_s
    for number in (signal.SIGSTOP, signal.SIGKILL):
        known: frozenset[Process] = frozenset()
        calm = 0
        while calm < _CALM and time.monotonic() < until:
            left = _besides(pid, but, alone)
            # One that begins another and ends is between two looks: nothing must change for several.
            calm = calm + 1 if not left or (number == signal.SIGSTOP and left <= known) else 0
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
            process = _process(child)
            if process is None or process in alone or process not in but:
                waiting.append(child)
                if process is not None and process not in alone:
                    found.add(process)
    return frozenset(found)


def _process(pid: int) -> Process | None:
    """None when it has ended. Its name may hold anything; its first thread may have ended before the others."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        if fields[0] == b"X" or (fields[0] == b"Z" and len([*Path(f"/proc/{pid}/task").iterdir()]) < 2):
            return None
        return Process(pid, int(fields[_START]))
    except (OSError, IndexError):
        return None
