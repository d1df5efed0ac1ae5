"""Processes of a box, seen from outside: who descends from whom, what they use."""

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICK_S = 0.005


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
    """What files take that have no name any more, and that the processes hold open."""
    seen: dict[tuple[int, int], int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    found = file.stat()
                    if found.st_nlink == 0 and found.st_blocks:
                        seen[found.st_dev, found.st_ino] = found.st_blocks * 512
    return sum(seen.values())


def marked(marker: str) -> list[int]:
    """Processes of this user that began with `marker` (NAME=value) in their environment."""
    found = []
    wanted = os.fsencode(marker)
    for path in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if path.name.isdigit() and wanted in (path / "environ").read_bytes().split(b"\0"):
                found.append(int(path.name))
    return found


def end_below(pid: int, deadline_s: float) -> bool:
    """Kill what descends from `pid`; whether that was all. They are stopped first, so that none begins another."""
    until = time.monotonic() + deadline_s
    for number in (signal.SIGSTOP, signal.SIGKILL):
        known: set[int] = set()
        while time.monotonic() < until:
            living = [below for below in descendants(pid) if _state(below) not in "ZX"]
            if not living or (number == signal.SIGSTOP and set(living) <= known):
                break
            for below in living:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(below, number)
            known |= set(living)
            time.sleep(_TICK_S)
    return not [below for below in descendants(pid) if _state(below) not in "ZX"]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "X"
