"""Boxes that are plain processes in a folder: no isolation at all, for where nothing else works and all is trusted.

What commands do is bounded, not confined: they run as this user, see the whole file system, other processes and the
network, and can end this very process. What holds is what all boxes have: one shell, limits on each process (memory,
processor time, file size), a look every quarter of a second at memory, processes and disk of the whole box, and that
everything that a command started is found again below its shell and ended with it. A process that leaves even that
(which only one that means to can: by killing the shell) is found by its environment when the box is closed or reaped.

Paths for `read` and `write` begin at the box's folder, whose `workspace` and `tmp` stand for /workspace and /tmp; no
link leads out of it.
"""

import asyncio
import contextlib
import os
import resource
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from headrace.actors.sandboxes import files, layers, processes
from headrace.actors.sandboxes.layers import Layer, Snapshot
from headrace.actors.sandboxes.piped_process import PipedProcess
from headrace.actors.sandboxes.provider import START_S, Box, BoxProvider
from headrace.actors.sandboxes.reaping import MARKER, OwnedFolder, box_folder, reap
from headrace.actors.sandboxes.script import best_shell, shell_argv
from headrace.actors.sandboxes.shell import Shell, ShellState
from headrace.actors.sandboxes.threads import ENDS, FILES, LOOKS, TREES
from headrace.actors.sandboxes.trees import copy_layer, remove_tree, used_bytes
from headrace.platform.config.sandbox import SandboxConfig
from headrace.platform.contracts import BoxLimits
from headrace.platform.errors import ConfigError

_LAUNCH = Path(__file__).with_name("launch.py")
_PLACES = ("workspace", "tmp")
_END_S = 3.0
_SHELLS = 1
"""Below the outer shell there is the inner one, which is not the agent's."""
T = TypeVar("T")


class ProcessBox(Box):
    """One box, its folder and its shell."""

    def __init__(
        self, provider: "ProcessProvider", folder: Path, shell: Shell, child: PipedProcess, sandbox_id: str
    ) -> None:
        super().__init__(sandbox_id, shell, provider.limits)
        self._provider = provider
        self.workspace = str(folder / "workspace")
        self._folder = folder
        self._child = child

    async def _read(self, path: str, limit: int) -> bytes:
        return await self._in_folder(lambda root: files.read_below(root, self._inside(path), limit))

    async def _write(self, path: str, data: bytes, limit: int) -> None:
        await self._in_folder(lambda root: files.write_below(root, self._inside(path), data, limit))

    async def _in_folder(self, act: Callable[[int], T]) -> T:
        if not self._child.shell_runs():
            raise self.shell.died()
        return await FILES.do(self._with_root, act)

    def _with_root(self, act: Callable[[int], T]) -> T:
        """Open, act and close, all in one thread: a cancelled call's thread goes on, with a descriptor of its own."""
        root = os.open(self._folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return act(root)
        finally:
            os.close(root)

    def _inside(self, path: str) -> str:
        """`path` from the box's folder on; commands name the same file by its place on the host."""
        if not path.startswith("/"):
            return f"workspace/{path}"
        return path.removeprefix(str(self._folder))

    async def _keep(self, state: ShellState) -> str:
        target = self._provider.new_layer()
        await self._provider.whole(
            TREES.do(layers.copy_upper, (), self._folder, target, self.limits.disk_mb << 20),
            lambda: remove_tree(target),
        )
        old, new = os.fsencode(self._folder), os.fsencode(target)
        moved = ShellState(state.directory.replace(old, new), state.exports.replace(old, new))
        return self._provider.remember(Snapshot(layers=[Layer(path=target)], state=moved))

    async def _over(self) -> str:
        return await LOOKS.do(_passed, self._child.pid, self._folder, self.limits)

    def _kill(self, why: str) -> None:
        self._child.kill(why)

    async def _end(self) -> None:
        await end_process_box(self._child, self._folder)


class ProcessProvider(BoxProvider):
    """Makes boxes that are processes in folders of `state`.

    Raises:
        ConfigError: the workspace that boxes begin with is no folder.
    """

    mode = "unsafe-process"

    def __init__(self, config: SandboxConfig, state: Path) -> None:
        super().__init__(config, state.resolve())
        if config.workspace and not Path(config.workspace).is_dir():
            raise ConfigError(f"sandbox.workspace={config.workspace} is no folder")
        self._owned: OwnedFolder | None = None
        self._layers = 0

    async def reap(self) -> int:
        """See `SandboxProvider.reap`."""
        return await TREES.do(reap, self.state)

    def new_layer(self) -> Path:
        """Where the next snapshot's files go."""
        self._layers += 1
        return self._folder() / f"s{self._layers}"

    def argv(self, folder: Path) -> list[str]:
        """How the shell of the box in `folder` is started. A kind that confines it does so here."""
        return shell_argv(best_shell(), host=True)

    def rlimits(self) -> dict[int, int]:
        """The limits that the process which `argv` begins sets for itself and for all that it starts."""
        return _rlimits(self.limits)

    async def _start(self, number: int, snapshot: Any) -> Box:
        folder = box_folder(self._folder(), number)
        child: PipedProcess | None = None
        filled = asyncio.create_task(TREES.do(self._fill, folder, snapshot))
        try:
            await asyncio.shield(filled)
            limits = ",".join(f"{kind}={most}" for kind, most in self.rlimits().items())
            launch = [sys.executable, "-I", "-S", str(_LAUNCH), str(os.getpid()), limits]
            exports = _exports(folder)
            environment = {**exports, MARKER: str(folder)}
            child = PipedProcess([*launch, *self.argv(folder)], environment, cwd=folder / "workspace")
            child.follow(child.pid)
            shell = Shell(child, self.limits, _state(folder, snapshot, environment), str(folder / "workspace"))
            await shell.listening(START_S)
            await shell.begin()
        except BaseException:
            await self.finish(_after(filled, end_process_box(child, folder)))
            raise
        return ProcessBox(self, folder, shell, child, f"{self.mode}-{folder.parent.name[-6:]}-{folder.name}")

    def _fill(self, folder: Path, snapshot: Snapshot | None) -> None:
        folder.mkdir()
        if snapshot is not None:
            _copy(snapshot.layers[0].path, folder)
            return
        for name in _PLACES:
            (folder / name).mkdir()
        if self.config.workspace:
            copy_layer(Path(self.config.workspace), folder / "workspace")

    async def _forget(self, snapshot: Any) -> None:
        await self.clear_away(partial(remove_tree, snapshot.layers[0].path))

    async def _release(self) -> None:
        if self._owned is not None:
            await TREES.do(self._owned.remove)

    def _folder(self) -> Path:
        if self._owned is None:
            self._owned = OwnedFolder(self.state)
        return self._owned.path


async def end_process_box(child: PipedProcess | None, folder: Path) -> None:
    """End the shell, all below it, and what carries the box's mark; then remove the folder."""
    if child is not None:
        if child.shell_runs():
            await ENDS.do(processes.end_below, child.pid, _END_S)
        await child.close()
        await ENDS.do(_end_marked, folder)
    await TREES.do(remove_tree, folder)


async def _after(filled: "asyncio.Task[None]", end: Coroutine[Any, Any, None]) -> None:
    """A thread cannot be stopped: the folder is removed once it is whole."""
    with contextlib.suppress(OSError):
        await filled
    await end


def _end_marked(folder: Path) -> None:
    for pid in processes.marked(f"{MARKER}={folder}"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _copy(source: Path, target: Path) -> None:
    for name in _PLACES:
        copy_layer(source / name, target / name)


def _state(folder: Path, snapshot: Snapshot | None, exports: Mapping[str, str]) -> ShellState:
    if snapshot is None:
        return ShellState.first(str(folder / "workspace"), exports)
    old, new = os.fsencode(snapshot.layers[0].path), os.fsencode(folder)
    return ShellState(snapshot.state.directory.replace(old, new), snapshot.state.exports.replace(old, new))


def _exports(folder: Path) -> dict[str, str]:
    workspace = str(folder / "workspace")
    path = os.environ.get("PATH", "/usr/local/bin:/usr/bin:/bin")
    return {"PATH": path, "HOME": workspace, "LANG": "C.UTF-8", "TMPDIR": str(folder / "tmp")}


def _rlimits(limits: BoxLimits) -> dict[int, int]:
    return {
        resource.RLIMIT_CPU: limits.cpu_s,
        resource.RLIMIT_FSIZE: limits.file_mb << 20,
        resource.RLIMIT_AS: limits.memory_mb << 20,
        resource.RLIMIT_CORE: 0,
    }


def _passed(shell: int, folder: Path, limits: BoxLimits) -> str:
    """The limit that a box has passed, or "". Blocks."""
    pids = processes.descendants(shell)
    disk = limits.disk_mb << 20
    if used_bytes([folder], disk) + processes.unlinked_bytes(pids) > disk:
        return f"it was over its disk of {limits.disk_mb} MiB"
    if len(pids) > limits.pids + _SHELLS:
        return f"it was over its {limits.pids} processes"
    if processes.memory_bytes(pids) > limits.memory_mb << 20:
        return f"it was over its memory of {limits.memory_mb} MiB"
    return ""


def why_not() -> str:
    """Why such boxes do not work here: they need to find the children of a process (Linux)."""
    if not Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").exists():
        return "this kernel does not list the children of a process (CONFIG_PROC_CHILDREN)"
    return ""
