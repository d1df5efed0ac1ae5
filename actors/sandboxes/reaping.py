"""Who owns what is on this host, and the removal of what the dead left (case X17).

A provider's folder lies in the node's state folder and names its owner: boot, pid namespace, process, and when that
process began, so that another one with the same number is no mistake. Beside the folder lies a file that its owner
keeps locked: the kernel frees the lock however the owner ends. A folder is anybody else's to remove once its lock is
free, or its owner surely dead: a process that the owner forked may have inherited the lock.
What lies outside of the folder and must go with it (control groups) is listed in it.

Its parts block: call them in a thread.
"""

import contextlib
import fcntl
import os
import secrets
import signal
from pathlib import Path

import msgspec

from headrace.actors.sandboxes.cgroups import remove_group
from headrace.actors.sandboxes.processes import marked
from headrace.actors.sandboxes.trees import remove_tree

LISTED_GROUPS = "groups"
"""In an owner's folder: the control groups of its boxes, one path a line."""
MARKER = "HEADRACE_BOX"
"""In the environment of every process of a box without a pid namespace, and of the bwrap of one with: its folder."""
_BOX = "b"
_LOCK = ".lock"


class Owner(msgspec.Struct, frozen=True):
    """A process of this host, for good: `boot` and `namespace` say where `pid` counts, `began` since when."""

    boot: str
    namespace: int
    pid: int
    began: int

    @classmethod
    def this(cls) -> "Owner":
        """This process."""
        return cls(_boot(), _namespace(), os.getpid(), _began(os.getpid()))

    @classmethod
    def named(cls, name: str) -> "Owner":
        """From its name. Raises ValueError."""
        boot, *numbers = name.split("-")[:4]
        namespace, pid, began = map(int, numbers)
        return cls(boot, namespace, pid, began)

    def __str__(self) -> str:
        return f"{self.boot}-{self.namespace}-{self.pid}-{self.began}"

    def is_dead(self) -> bool:
        """Whether it surely has ended. One of another pid namespace cannot be seen from here, and counts as alive."""
        if self.boot != _boot():
            return True
        if self.namespace != _namespace():
            return False
        return _began(self.pid) != self.began


class OwnedFolder:
    """A folder of this process in the state folder, locked as long as this object is open."""

    def __init__(self, state: Path) -> None:
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        while True:
            name = f"{Owner.this()}-{secrets.token_hex(3)}"
            lock = _locked(state / (name + _LOCK))
            if lock is not None:
                break
        self._lock = lock
        self.path = state / name
        self.path.mkdir(mode=0o700)

    def remove(self) -> None:
        """Remove it with all that is in it, and let go of it. Safe to call twice."""
        if self._lock >= 0:
            remove_tree(self.path)
            self.path.with_name(self.path.name + _LOCK).unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = -1


def box_folder(parent: Path, number: int) -> Path:
    """Where a provider keeps its box of that number."""
    return parent / f"{_BOX}{number}"


def reap(state: Path) -> int:
    """Remove the folders of owners that have ended, with the groups and processes that belong to them.

    Returns:
        How many boxes that was.
    """
    boxes = 0
    for path in sorted(state.glob("*" + _LOCK)) if state.is_dir() else []:
        lock = _locked(path)
        if lock is None and not _owner_is_dead(path):
            continue
        try:
            boxes += _reap_folder(path.with_name(path.name.removesuffix(_LOCK)))
            path.unlink(missing_ok=True)
        except OSError:
            continue  # something still ends; the next round takes it
        finally:
            if lock is not None:
                os.close(lock)
    return boxes


def _owner_is_dead(path: Path) -> bool:
    """Whether who named a lock has ended: one that is held all the same was inherited by a process that it started."""
    try:
        return Owner.named(path.name).is_dead()
    except ValueError:
        return False


def _reap_folder(folder: Path) -> int:
    boxes = [path for path in folder.glob(_BOX + "*") if path.is_dir()] if folder.is_dir() else []
    for box in boxes:
        for pid in marked(f"{MARKER}={box}"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    listed = folder / LISTED_GROUPS
    for group in listed.read_text().splitlines() if listed.is_file() else []:
        remove_group(Path(group))
    remove_tree(folder)
    return len(boxes)


def _locked(path: Path) -> int | None:
    """A descriptor that holds the lock of `path`; None while another process does."""
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever held it may have removed the file meanwhile.
            if os.fstat(lock).st_nlink:
                return lock
        except OSError:
            pass
        os.close(lock)
    except FileNotFoundError:
        pass
    return None


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().replace("-", "")[:12]


def _namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


def _began(pid: int) -> int:
    """When a process began, in clock ticks since the boot; 0 when there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError):
        return 0
