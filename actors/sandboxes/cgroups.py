"""Limits on a whole box by control groups, of version 1 or 2, where this process may make some.

A provider looks once for the folders in which it may (`find_controllers`); each box has a group of its own in each.
What no group limits is limited otherwise: `controllers` says what is.
"""

import contextlib
import errno
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace.platform.contracts import BoxLimits

NEEDED = ("memory", "pids", "cpu")
SPARE_PROCESSES = 3
"""bwrap and the two shells of a box are processes too, and not the agent's."""
_SHELLS = 2
"""Those are in its groups; bwrap is not."""
_PERIOD_US = 100_000
_REMOVE_S = 2.0
_TICK_S = 0.005
_CHARGED_SHARE = 16
"""Groups are used again while no more than this part of the limit is charged to them."""


class Parents:
    """For each controller that can be used here, the folder to make groups in, and its version."""

    def __init__(self, folders: Mapping[str, Path], version: Mapping[str, int]) -> None:
        self.folders = dict(folders)
        self.version = dict(version)

    @property
    def controllers(self) -> frozenset[str]:
        """Of NEEDED, those that are there."""
        return frozenset(self.folders)

    def named(self, name: str) -> list[Path]:
        """The folders of the groups of that name."""
        return sorted({parent / name for parent in self.folders.values()})


class Group:
    """One box's groups. Its methods block for well under a millisecond, `remove` for longer."""

    def __init__(self, parents: Parents, name: str, limits: BoxLimits) -> None:
        self._memory: tuple[Path, int] | None = None
        self._most_charged = (limits.memory_mb << 20) // _CHARGED_SHARE
        self.paths = parents.named(name)
        try:
            for path in self.paths:
                path.mkdir()
            for controller, parent in parents.folders.items():
                path, version = parent / name, parents.version[controller]
                _limit(path, version, controller, limits)
                if controller == "memory":
                    self._memory = path, version
        except BaseException:
            self.remove()
            raise
        self._seen_kills = 0

    def join(self, pid: int) -> None:
        """Put a process into them; what it starts from now on is in them too. Raises OSError."""
        for path in self.paths:
            _write(path / "cgroup.procs", pid)

    def is_fresh(self) -> bool:
        """Whether they are as good as new: nothing is in them, and little is charged to them. Kills so far count no
        more."""
        if _words(self.paths[0] / "cgroup.procs"):  # the others hold the same processes
            return False
        self._seen_kills = self._kills()
        if self._memory is None:
            return True
        path, version = self._memory
        used = _words(path / ("memory.usage_in_bytes" if version == 1 else "memory.current"))
        return bool(used) and int(used[0]) < self._most_charged

    def memory_kill(self) -> bool:
        """Whether the kernel killed something for memory since this was last asked."""
        kills = self._kills()
        new, self._seen_kills = kills > self._seen_kills, kills
        return new

    def remove(self) -> None:
        """Remove them. Processes that are still in them are killed."""
        for path in self.paths:
            remove_group(path)
        self.paths = []

    def _kills(self) -> int:
        if self._memory is None:
            return 0
        path, version = self._memory
        with contextlib.suppress(OSError, ValueError):
            text = (path / ("memory.oom_control" if version == 1 else "memory.events")).read_text()
            for line in text.splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
        return 0


def find_controllers(mounts: str, own: str) -> Parents:
    """Where groups can be made.

    Args:
        mounts: the text of /proc/self/mountinfo.
        own: the text of /proc/self/cgroup.
    """
    folders: dict[str, Path] = {}
    version: dict[str, int] = {}
    mine = {names: path for _, names, path in (line.split(":", 2) for line in own.splitlines())}
    for line in mounts.splitlines():
        fields, _, rest = line.partition(" - ")
        kind, _, options = [*rest.split(), "", "", ""][:3]
        root, mount = fields.split()[3:5]
        if kind == "cgroup":
            names = set(options.split(","))
            here = next((path for key, path in mine.items() if key and set(key.split(",")) <= names), None)
            wanted = [name for name in NEEDED if name in names and name not in folders]
            parent = _writable(_place(mount, root, here), mount, ()) if wanted and here else None
        elif kind == "cgroup2":
            wanted = [name for name in NEEDED if name not in folders]
            parent = _writable(_place(mount, root, mine.get("", "/")), mount, wanted)
            wanted = [name for name in wanted if parent and name in _words(parent / "cgroup.subtree_control")]
        else:
            continue
        for name in wanted if parent else ():
            assert parent is not None
            folders[name], version[name] = parent, 1 if kind == "cgroup" else 2
    return Parents(folders, version)


def remove_group(path: Path) -> None:
    """Remove one group, once the processes in it have ended; they are killed where that can be.

    Raises:
        OSError: they have not ended in time.
    """
    until = time.monotonic() + _REMOVE_S
    while True:
        try:
            path.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > until:
                raise
        for pid in _words(path / "cgroup.procs"):
            with contextlib.suppress(ProcessLookupError):
                if int(pid) > 0:
                    os.kill(int(pid), signal.SIGKILL)
        time.sleep(_TICK_S)


def _place(mount: str, root: str, own: str) -> Path:
    """This process's group as a folder; a container sees its own group as the root."""
    inside = own.removeprefix(root.rstrip("/")) if own.startswith(root) else "/"
    return Path(mount + inside)


def _writable(own: Path, mount: str, controllers: Sequence[str]) -> Path | None:
    """The nearest folder from `own` upwards in which groups can be made that have the controllers (version 2: those of
    its subtree)."""
    for folder in (own, *own.parents):
        if controllers and not set(controllers) & set(_words(folder / "cgroup.subtree_control")):
            pass
        elif folder.is_dir() and os.access(folder, os.W_OK) and _can_make(folder):
            return folder
        if str(folder) == mount:
            break
    return None


def _can_make(folder: Path) -> bool:
    probe = folder / f"headrace-probe-{os.getpid()}"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError:
        return False
    return True


def _limit(path: Path, version: int, controller: str, limits: BoxLimits) -> None:
    memory, quota = limits.memory_mb << 20, int(limits.cpus * _PERIOD_US)
    if controller == "memory":
        _write(path / ("memory.limit_in_bytes" if version == 1 else "memory.max"), memory)
        with contextlib.suppress(OSError):  # a kernel that does not account swap has neither
            if version == 1:
                _write(path / "memory.memsw.limit_in_bytes", memory)
            else:
                _write(path / "memory.swap.max", 0)
    elif controller == "pids":
        _write(path / "pids.max", limits.pids + _SHELLS)
    elif version == 1:
        _write(path / "cpu.cfs_period_us", _PERIOD_US)
        _write(path / "cpu.cfs_quota_us", quota)
    else:
        _write(path / "cpu.max", f"{quota} {_PERIOD_US}")


def _write(path: Path, value: int | str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(file, str(value).encode())
    finally:
        os.close(file)


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
