"""What the boxes of Docker need besides the SDK: where the daemon is and whether it is fit, the archive that a
workspace begins as, digests, and what this machine knows of a container that runs on it.

All of it blocks: call it in a thread.
"""

import contextlib
import hashlib
import io
import os
import socket
import struct
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from headrace.actors.sandboxes.processes import unlinked_bytes

USER = 1000
PING_S = 5.0
_DEFAULT_URL = "unix:///var/run/docker.sock"
_TCP_PORT = 2375
WORKSPACE = "/workspace"
_CGROUPS = Path("/sys/fs/cgroup")
_FRAME = struct.Struct(">BxxxL")


def daemon_url() -> str:
    """Where the daemon is asked for: DOCKER_HOST, else the usual socket."""
    return os.environ.get("DOCKER_HOST") or _DEFAULT_URL


def knock(url: str) -> None:
    """Connect once: the SDK leaves a socket open for each daemon that it does not find. Raises OSError."""
    parts = urlsplit(url)
    address: Any = parts.path if parts.scheme == "unix" else (parts.hostname or "", parts.port or _TCP_PORT)
    with socket.socket(socket.AF_UNIX if parts.scheme == "unix" else socket.AF_INET) as connection:
        connection.settimeout(PING_S)
        connection.connect(address)


def unfit_for_boxes(about: Mapping[str, Any]) -> str:
    """Why a daemon cannot isolate as declared, or ""."""
    if about.get("OSType") != "linux":
        return "runs no Linux containers"
    if not any("name=seccomp" in option for option in about.get("SecurityOptions") or ()):
        return "has no seccomp; start one that has"
    for limit in ("MemoryLimit", "PidsLimit", "CPUCfsQuota"):
        if about.get(limit) is False:
            return f"cannot limit boxes: its machine has no control group for {limit}"
    return ""


def innermost(error: BaseException) -> str:
    """The innermost cause, on one line: the SDK wraps errors several times."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return (str(error) or type(error).__name__).splitlines()[0]


def root_digest(layers: Sequence[str]) -> str:
    """One digest of a root file system, from those of its layers, lowest first."""
    return "sha256:" + hashlib.sha256("\n".join(layers).encode()).hexdigest()


def write_start(file: IO[bytes], workspace: Path | None) -> None:
    """Write a tar archive for a container's root: /tmp for everybody, and /workspace of the box's user, with the files
    of the folder `workspace`. Links stay links. Raises OSError."""
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, mode in (("tmp", 0o1777), ("workspace", 0o755)):
            info = tarfile.TarInfo(name)
            info.type, info.mode, info.uid, info.gid = tarfile.DIRTYPE, mode, USER, USER
            tar.addfile(info, io.BytesIO())
        for path in sorted(workspace.iterdir()) if workspace else ():
            tar.add(path, f"workspace/{path.name}", filter=_owned)


def _owned(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """The entry as the box's user's; None leaves out what is neither file, folder nor link."""
    info.uid = info.gid = USER
    info.uname = info.gname = ""
    return info if info.isfile() or info.isdir() or info.issym() or info.islnk() else None


def streams(data: bytes) -> tuple[bytes, bytes]:
    """Standard output and error from the frames of a finished command, the last of which may be cut."""
    found = {1: bytearray(), 2: bytearray()}
    start = 0
    while len(data) - start >= _FRAME.size:
        stream, length = _FRAME.unpack_from(data, start)
        start += _FRAME.size
        found.get(stream, bytearray()).extend(data[start : start + length])
        start += length
    return bytes(found[1]), bytes(found[2])


class ContainerGroup:
    """The control group of a container, seen from this machine. Of one that runs elsewhere nothing is known."""

    def __init__(self, container: str, pid: int) -> None:
        self._folder = _memory_folder(container, pid)
        self._seen = 0

    def memory_kill(self) -> bool:
        """Whether the kernel killed something in it for memory since this was last asked."""
        kills = self._kills()
        new, self._seen = kills > self._seen, kills
        return new

    def unlinked_bytes(self) -> int:
        """What files take that its processes hold open and that have no name any more."""
        if self._folder is None:
            return 0
        with contextlib.suppress(OSError, ValueError):
            return unlinked_bytes(map(int, (self._folder / "cgroup.procs").read_text().split()))
        return 0

    def _kills(self) -> int:
        for name in ("memory.events", "memory.oom_control") if self._folder else ():
            assert self._folder is not None
            with contextlib.suppress(OSError, ValueError):
                for line in (self._folder / name).read_text().splitlines():
                    key, _, count = line.partition(" ")
                    if key == "oom_kill":
                        return int(count)
        return 0


def reachable(pid: int, container: str) -> int:
    """`pid` where it is the container's first process on this machine, and this process may end what it starts; else 0:
    the daemon may be of another machine."""
    with contextlib.suppress(OSError):
        place = Path(f"/proc/{pid}")
        numbers = [line.split() for line in (place / "status").read_text().splitlines() if line.startswith("NSpid:")]
        mine = os.geteuid() in (0, place.stat().st_uid)
        if mine and numbers and len(numbers[0]) > 2 and numbers[0][-1] == "1":
            return pid if container in (place / "cgroup").read_text() else 0
    return 0


def _memory_folder(container: str, pid: int) -> Path | None:
    """By the process that the daemon names: it counts only if its groups bear the container's name."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if container not in path or controllers not in ("", "memory"):
            continue
        folder = _CGROUPS / controllers / path.lstrip("/")
        if (folder / "memory.events").is_file() or (folder / "memory.oom_control").is_file():
            return folder
    return None
