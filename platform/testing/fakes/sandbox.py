"""A sandbox in memory: files in a dict and a handful of commands.

It isolates nothing, because it runs nothing: `mode` says so. It is for tests of what uses a sandbox.
"""

import posixpath
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from headrace.platform.contracts import CommandResult
from headrace.platform.errors import SandboxDied

_NOT_FOUND = 127
_SYNTAX = 2
_WORKSPACE = "/workspace"


@dataclass(kw_only=True, slots=True)
class _World:
    """What a snapshot keeps: files by absolute path, the directory, the exported variables."""

    files: dict[str, bytes] = field(default_factory=dict)
    directory: str = _WORKSPACE
    variables: dict[str, str] = field(default_factory=dict)

    def copy(self) -> "_World":
        return _World(files=dict(self.files), directory=self.directory, variables=dict(self.variables))


class MemorySandbox:
    """One box. Knows `echo … [> FILE]`, `cat FILE…`, `ls`, `rm FILE…`, `cd FOLDER`, `pwd`, `export NAME=VALUE`, `sleep
    SECONDS`, `true` and `false`, and puts in variables written `$NAME`."""

    def __init__(self, provider: "MemorySandboxProvider", sandbox_id: str, world: _World) -> None:
        self.sandbox_id = sandbox_id
        self._provider = provider
        self._world = world.copy()
        self._gone = ""
        self._commands: dict[str, Callable[[Sequence[str]], tuple[int, bytes]]] = {
            "echo": self._echo,
            "cat": self._cat,
            "ls": lambda _: (0, "".join(f"{name}\n" for name in self._names()).encode()),
            "rm": self._rm,
            "cd": self._cd,
            "pwd": lambda _: (0, f"{self._world.directory}\n".encode()),
            "export": self._export,
            "true": lambda _: (0, b""),
            "false": lambda _: (1, b""),
        }

    async def run(self, command: str, timeout_s: float, silence_s: float | None = None) -> CommandResult:
        """See `Sandbox.run`. Time passes in the result only: `sleep` returns at once."""
        self._check_open()
        try:
            words = [self._world.variables.get(word[1:], "") if word[:1] == "$" else word for word in _words(command)]
        except ValueError as error:
            return CommandResult(_SYNTAX, f"syntax error: {error}\n")
        if not words:
            return CommandResult(0, "")
        if words[0] == "sleep":
            return _slept(words[1:], timeout_s, silence_s)
        if words[0] not in self._commands:
            return CommandResult(_NOT_FOUND, f"{words[0]}: command not found\n")
        code, output = self._commands[words[0]](words[1:])
        return CommandResult(code, output.decode("utf-8", errors="replace"))

    async def read(self, path: str) -> bytes:
        """See `Sandbox.read`."""
        self._check_open()
        name = posixpath.join(_WORKSPACE, path)
        if name not in self._world.files:
            raise FileNotFoundError(path)
        return self._world.files[name]

    async def write(self, path: str, data: bytes) -> None:
        """See `Sandbox.write`."""
        self._check_open()
        self._world.files[posixpath.join(_WORKSPACE, path)] = bytes(data)

    async def snapshot(self) -> str:
        """See `Sandbox.snapshot`."""
        self._check_open()
        return self._provider.keep(self._world)

    async def close(self) -> None:
        """See `Sandbox.close`."""
        self.kill("it was closed")
        self._provider.live.discard(self.sandbox_id)

    def kill(self, why: str = "it was killed") -> None:
        """As if its processes had been killed: every later call but `close` raises SandboxDied."""
        self._gone = self._gone or why

    def _check_open(self) -> None:
        if self._gone:
            raise SandboxDied(f"the box {self.sandbox_id} is gone: {self._gone}")

    def _names(self) -> list[str]:
        here = self._world.directory + "/"
        return sorted(path.removeprefix(here) for path in self._world.files if path.startswith(here))

    def _at(self, path: str) -> str:
        return posixpath.normpath(posixpath.join(self._world.directory, path))

    def _echo(self, words: Sequence[str]) -> tuple[int, bytes]:
        if len(words) >= 2 and words[-2] == ">":
            self._world.files[self._at(words[-1])] = (" ".join(words[:-2]) + "\n").encode()
            return 0, b""
        return 0, (" ".join(words) + "\n").encode()

    def _cat(self, paths: Sequence[str]) -> tuple[int, bytes]:
        output, code = b"", 0
        for path in paths:
            if self._at(path) in self._world.files:
                output += self._world.files[self._at(path)]
            else:
                output += f"cat: {path}: no such file\n".encode()
                code = 1
        return code, output

    def _rm(self, paths: Sequence[str]) -> tuple[int, bytes]:
        missing = [path for path in paths if self._world.files.pop(self._at(path), None) is None]
        return int(bool(missing)), "".join(f"rm: {path}: no such file\n" for path in missing).encode()

    def _cd(self, words: Sequence[str]) -> tuple[int, bytes]:
        self._world.directory = self._at(words[0] if words else _WORKSPACE)
        return 0, b""

    def _export(self, words: Sequence[str]) -> tuple[int, bytes]:
        self._world.variables.update(word.partition("=")[::2] for word in words)
        return 0, b""


def _words(command: str) -> list[str]:
    if "\0" in command:
        raise ValueError("a command cannot contain the character NUL")
    return shlex.split(command)


def _slept(words: Sequence[str], timeout_s: float, silence_s: float | None) -> CommandResult:
    try:
        seconds = sum(float(word) for word in words)
    except ValueError:
        return CommandResult(1, f"sleep: invalid time interval {' '.join(words)!r}\n")
    if silence_s is not None and silence_s < min(seconds, timeout_s):
        return CommandResult(None, "", limit="silence", seconds=silence_s)
    if seconds > timeout_s:
        return CommandResult(None, "", limit="time", seconds=timeout_s)
    return CommandResult(0, "", seconds=seconds)


class MemorySandboxProvider:
    """Makes boxes in memory. `live` are the ids of those that are open; `files` is what their workspace begins with."""

    mode = "memory: no isolation"
    image_digest = ""

    def __init__(self, files: Mapping[str, bytes] | None = None) -> None:
        self.live: set[str] = set()
        self._made = 0
        self._first = _World(files={posixpath.join(_WORKSPACE, path): data for path, data in (files or {}).items()})
        self._boxes: list[MemorySandbox] = []
        self._snapshots: dict[str, _World] = {}
        self._kept = 0
        self._closed = False

    async def create(self) -> MemorySandbox:
        """See `SandboxProvider.create`."""
        return self._open(self._first)

    async def restore(self, snapshot_id: str) -> MemorySandbox:
        """See `SandboxProvider.restore`.

        Raises:
            KeyError: for an unknown snapshot.
        """
        return self._open(self._snapshots[snapshot_id])

    async def discard(self, snapshot_id: str) -> None:
        """See `SandboxProvider.discard`."""
        self._snapshots.pop(snapshot_id, None)

    async def reap(self) -> int:
        """Nothing: boxes in memory go with their owner."""
        return 0

    async def close(self) -> None:
        """See `SandboxProvider.close`."""
        self._closed = True
        for box in self._boxes:
            await box.close()
        self._snapshots.clear()

    def keep(self, world: _World) -> str:
        """Keep a copy; its snapshot id."""
        self._kept += 1
        snapshot_id = f"snapshot-{self._kept}"
        self._snapshots[snapshot_id] = world.copy()
        return snapshot_id

    def _open(self, world: _World) -> MemorySandbox:
        if self._closed:
            raise SandboxDied("no box: its provider is closed")
        self._made += 1
        box = MemorySandbox(self, f"memory-{self._made}", world)
        self.live.add(box.sandbox_id)
        self._boxes.append(box)
        return box
