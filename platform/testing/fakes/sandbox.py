"""A sandbox in memory: files in a dict and a handful of commands.

It isolates nothing, because it runs nothing: `mode` says so. It is for tests of what uses a sandbox.
"""

import shlex
from collections.abc import Callable, Sequence

from headrace.platform.contracts import CommandResult

_NOT_FOUND = 127
_SYNTAX = 2


class MemorySandbox:
    """One box. Knows `echo … [> FILE]`, `cat FILE…`, `ls`, `rm FILE…`, `sleep SECONDS`, `true` and `false`."""

    def __init__(self, provider: "MemorySandboxProvider", sandbox_id: str, files: dict[str, bytes]) -> None:
        self.sandbox_id = sandbox_id
        self._provider = provider
        self._files = dict(files)
        self._closed = False
        self._commands: dict[str, Callable[[Sequence[str]], tuple[int, bytes]]] = {
            "echo": self._echo,
            "cat": self._cat,
            "ls": lambda _: (0, "".join(f"{path}\n" for path in sorted(self._files)).encode()),
            "rm": self._rm,
            "true": lambda _: (0, b""),
            "false": lambda _: (1, b""),
        }

    async def run(self, command: str, timeout_s: float) -> CommandResult:
        """See `Sandbox.run`. Time passes in the result only: `sleep` returns at once."""
        self._check_open()
        try:
            words = shlex.split(command)
        except ValueError as error:
            return CommandResult(_SYNTAX, f"syntax error: {error}\n")
        if not words:
            return CommandResult(0, "")
        if words[0] == "sleep":
            return _slept(words[1:], timeout_s)
        if words[0] not in self._commands:
            return CommandResult(_NOT_FOUND, f"{words[0]}: command not found\n")
        code, output = self._commands[words[0]](words[1:])
        return CommandResult(code, output.decode("utf-8", errors="replace"))

    async def read(self, path: str) -> bytes:
        """See `Sandbox.read`."""
        self._check_open()
        if path not in self._files:
            raise FileNotFoundError(path)
        return self._files[path]

    async def write(self, path: str, data: bytes) -> None:
        """See `Sandbox.write`."""
        self._check_open()
        self._files[path] = bytes(data)

    async def snapshot(self) -> str:
        """See `Sandbox.snapshot`."""
        self._check_open()
        return self._provider.keep(self._files)

    async def close(self) -> None:
        """See `Sandbox.close`."""
        self._closed = True
        self._provider.live.discard(self.sandbox_id)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"the box {self.sandbox_id} is closed")

    def _echo(self, words: Sequence[str]) -> tuple[int, bytes]:
        if len(words) >= 2 and words[-2] == ">":
            self._files[words[-1]] = (" ".join(words[:-2]) + "\n").encode()
            return 0, b""
        return 0, (" ".join(words) + "\n").encode()

    def _cat(self, paths: Sequence[str]) -> tuple[int, bytes]:
        output, code = b"", 0
        for path in paths:
            if path in self._files:
                output += self._files[path]
            else:
                output += f"cat: {path}: no such file\n".encode()
                code = 1
        return code, output

    def _rm(self, paths: Sequence[str]) -> tuple[int, bytes]:
        missing = [path for path in paths if self._files.pop(path, None) is None]
        return int(bool(missing)), "".join(f"rm: {path}: no such file\n" for path in missing).encode()


def _slept(words: Sequence[str], timeout_s: float) -> CommandResult:
    try:
        seconds = sum(float(word) for word in words)
    except ValueError:
        return CommandResult(1, f"sleep: invalid time interval {' '.join(words)!r}\n")
    if seconds > timeout_s:
        return CommandResult(None, "", limit="timeout", seconds=timeout_s)
    return CommandResult(0, "", seconds=seconds)


class MemorySandboxProvider:
    """Makes boxes in memory. `live` are the ids of those that are open."""

    mode = "memory: no isolation"

    def __init__(self) -> None:
        self.live: set[str] = set()
        self._made = 0
        self._snapshots: dict[str, dict[str, bytes]] = {}

    async def create(self) -> MemorySandbox:
        """See `SandboxProvider.create`."""
        return self._open({})

    async def restore(self, snapshot_id: str) -> MemorySandbox:
        """See `SandboxProvider.restore`.

        Raises:
            KeyError: for an unknown snapshot.
        """
        return self._open(self._snapshots[snapshot_id])

    async def reap(self) -> int:
        """Nothing: boxes in memory go with their owner."""
        return 0

    def keep(self, files: dict[str, bytes]) -> str:
        """Keep a copy of `files`; its snapshot id."""
        snapshot_id = f"snapshot-{len(self._snapshots)}"
        self._snapshots[snapshot_id] = dict(files)
        return snapshot_id

    def _open(self, files: dict[str, bytes]) -> MemorySandbox:
        self._made += 1
        box = MemorySandbox(self, f"memory-{self._made}", files)
        self.live.add(box.sandbox_id)
        return box
