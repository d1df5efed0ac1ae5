"""Boxes confined by Landlock and seccomp, without namespaces: for where those are refused. Through PyPI `sandlock`.

A box is an `unsafe-process` box (folder, shell, limits, snapshots) whose shell is started by a supervisor that confines
it: it reads programs, libraries and a handful of files in /etc, and writes its own folder; it reaches no network unless
granted, sees and signals no process but its own, makes no namespaces, mounts or devices. The number of processes is
held for the whole box; memory for each process, and for the box by a look (the supervisor's own count learns too late
of processes that have ended, and then refuses memory to the next ones).

What namespaces would give is not there: the workspace lies at its true path, TMPDIR names the box's own folder and /tmp
is not to be used, names and sizes of what may be read are the host's, and there is no limit on processors. Where
headrace runs as root the box keeps that user's id, without any of its capabilities.
"""

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from headrace.actors.sandboxes import processes
from headrace.actors.sandboxes.process import ProcessBox, ProcessProvider
from headrace.actors.sandboxes.provider import Box
from headrace.actors.sandboxes.script import best_shell, shell_argv
from headrace.actors.sandboxes.shell import ShellState
from headrace.actors.sandboxes.threads import ENDS, QUICK
from headrace.platform.contracts import CommandResult

_LAUNCH = Path(__file__).with_name("landlock_launch.py")
_READABLE = ("/usr", "/lib", "/lib64", "/bin", "/proc", "/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
_ETC = ("passwd", "group", "ld.so.cache", "nsswitch.conf", "localtime", "alternatives", "ssl/certs")
_NETWORK = ("hosts", "resolv.conf")
_WRITABLE = ("/dev/null",)
_FILES = 1024
_END_S, _TICK_S = 3.0, 0.01
_SHELLS = 1
"""Of the two shells one is left over: the supervisor counts what is there besides the first process."""
_PROGRAMS = ("prlimit", "setpriv")


def why_not() -> str:
    """Why boxes of this kind cannot run here; empty when they can."""
    try:
        import sandlock
    except (ImportError, OSError) as error:
        return f"sandlock cannot be loaded ({error}); pip install sandlock"
    found, needed = sandlock.landlock_abi_version(), sandlock.min_landlock_abi()
    if found < 1:
        return "this kernel has no Landlock, or has it switched off; boot with lsm=landlock,..., or use another kind"
    if found < needed:
        return f"this kernel's Landlock is of ABI {found}, and {needed} is needed (Linux 6.12); use another kind"
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    return f"there is no {missing[0]}; apt-get install util-linux" if missing else ""


class LandlockBox(ProcessBox):
    """A box whose orphans fall to its supervisor instead of its shell, and are ended from outside."""

    def __init__(self, provider: "LandlockProvider", box: ProcessBox) -> None:
        super().__init__(provider, box._folder, box.shell, box._child, box.sandbox_id)
        self._outer = self._children()  # nothing of an agent's ran yet: this is the shell
        below = processes.living(self._child.pid)
        self._child.watchers = frozenset(process for process in below if process.pid in self._outer)

    async def run(self, command: str, timeout_s: float, silence_s: float | None = None) -> CommandResult:
        """See `Sandbox.run`."""
        before = set(await QUICK.do(processes.descendants, self._child.pid))
        result = await super().run(command, timeout_s, silence_s)
        if result.limit:
            await ENDS.do(self._end_orphans, before)
        return result

    async def _keep(self, state: ShellState) -> str:
        await ENDS.do(self._end_orphans, set())
        return await super()._keep(state)

    def _orphans(self) -> set[int]:
        return self._children() - self._outer

    def _children(self) -> set[int]:
        """Of the supervisor: the shell, and whatever fell to it."""
        supervisor = self._child.pid
        found: set[int] = set()
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{supervisor}/task").iterdir():
                found.update(map(int, (task / "children").read_text().split()))
        return found

    def _end_orphans(self, but: set[int]) -> None:
        """With all below them; again until none is new."""
        until = time.monotonic() + _END_S
        while (left := self._orphans() - but) and time.monotonic() < until:
            for pid in [*left, *(below for one in left for below in processes.descendants(one))]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_TICK_S)


class LandlockProvider(ProcessProvider):
    """Makes boxes that are confined processes in folders of `state`. Raises ConfigError as `ProcessProvider`."""

    mode = "landlock"

    async def _start(self, number: int, snapshot: Any) -> Box:
        box = await super()._start(number, snapshot)
        assert isinstance(box, ProcessBox)
        return LandlockBox(self, box)

    def argv(self, folder: Path) -> list[str]:
        """The supervisor, and what it is to confine."""
        etc = [f"/etc/{name}" for name in (*_ETC, *(_NETWORK if self.config.network else ()))]
        specification = {
            "argv": [*self._limiting(), *shell_argv(best_shell(), host=True)],
            "readable": [path for path in (*_READABLE, *etc) if Path(path).exists()],
            "writable": [*map(str, (folder / "workspace", folder / "tmp")), *_WRITABLE],
            "cwd": str(folder / "workspace"),
            "pids": self.limits.pids + _SHELLS,
            "network": self.config.network,
        }
        return [sys.executable, "-I", str(_LAUNCH), json.dumps(specification)]

    def rlimits(self) -> dict[int, int]:
        """None for the supervisor, which works for the box; the box gets its own from `argv`."""
        return {}

    def _limiting(self) -> list[str]:
        """Programs that set a limit or drop a right, and become the next one."""
        limits = self.limits
        words = [
            "prlimit",
            f"--cpu={limits.cpu_s}",
            f"--fsize={limits.file_mb << 20}",
            "--core=0",
            f"--as={limits.memory_mb << 20}",
            f"--nofile={_FILES}",
        ]
        if os.geteuid() == 0:
            words += ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]
        return [shutil.which(word) or word if word in _PROGRAMS else word for word in words]
