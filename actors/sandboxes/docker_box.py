"""One container as a box: its shell, its files and its snapshots.

Files are read and written by a process of their own beside the shell, as the box's user: what links and permissions
mean is what they mean in the container, and nothing of the agent's shell is asked. That costs a few hundredths of a
second a file; many files are better made by one command.
"""

import contextlib
import errno
import os
import secrets
import socket
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.actors.sandboxes.docker_channel import AttachedShell
from headrace.actors.sandboxes.docker_host import USER, WORKSPACE, streams
from headrace.actors.sandboxes.provider import Box
from headrace.actors.sandboxes.shell import Shell, ShellState
from headrace.platform.errors import SandboxDied

if TYPE_CHECKING:
    from headrace.actors.sandboxes.docker import DockerProvider

_FILE_S = 30.0
_MOST_SAID = 1 << 16
_FRAMES_SHARE = 8
"""The heads of the frames take at most this part of what is in them: a program writes by the kilobyte."""
_SHELLS = 2
_READ = """
[ -e "$1" ] || { echo none >&2; exit; }
[ -f "$1" ] && [ -r "$1" ] || { echo no plain file that can be read >&2; exit; }
head -c "$2" < "$1" && echo done >&2
"""
_WRITE = """
umask 022
case "$1" in */*) mkdir -p "${1%/*}/" || exit;; esac
[ ! -e "$1" ] || [ -f "$1" ] || { echo no plain file >&2; exit; }
cat > "$1" && echo done >&2
"""
_END = """
for one in /proc/[0-9]*; do
case "$(cat "$one/environ" 2>/dev/null)" in *"$1"*) kill -9 "${one#/proc/}";; esac
done 2>/dev/null
"""


class Snapshot(NamedTuple):
    """An image, and where the shell in it was."""

    image: str
    state: ShellState


class DockerBox(Box):
    """One container."""

    workspace = WORKSPACE

    def __init__(self, provider: "DockerProvider", container: str, shell: Shell, channel: AttachedShell) -> None:
        super().__init__(f"docker-{container[:12]}", shell, provider.limits)
        self._provider, self._container, self._channel = provider, container, channel

    async def _read(self, path: str, limit: int) -> bytes:
        data = await self._file(_READ, path, str(limit + 1), limit=limit + 1)
        if len(data) > limit:
            raise OSError(errno.EFBIG, f"larger than {limit} bytes", path)
        return data

    async def _write(self, path: str, data: bytes, limit: int) -> None:
        if len(data) > limit:
            raise OSError(errno.EFBIG, f"larger than {limit} bytes", path)
        await self._file(_WRITE, path, data=data)

    async def _file(self, script: str, path: str, *arguments: str, data: bytes = b"", limit: int = 0) -> bytes:
        """A file by a process of its own beside the shell: with the rights of the box's user, and nothing of the
        agent's shell in between."""
        if not self._channel.alive:
            raise self.shell.died()
        if "\0" in path or not path:
            raise OSError(errno.EINVAL, "not a path", path)
        most = limit + limit // _FRAMES_SHARE + _MOST_SAID
        words = ["/bin/sh", "-c", script, "sh", f"{WORKSPACE}/{path}" if path[0] != "/" else path, *arguments]
        try:
            found = await self._provider.engine.held(
                lambda client: _execute(client, self._container, words, data, most)
            )
        except SandboxDied:
            if self._channel.alive:
                raise OSError(errno.EIO, "the daemon could not reach it", path) from None
            raise
        if not self._channel.alive:
            raise self.shell.died()
        if len(found) > most:
            raise OSError(errno.EFBIG, "more came than was asked for", path)
        output, said = streams(found)
        answer = said.decode(errors="replace").strip()
        if answer == "none":
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        if answer.splitlines()[-1:] != ["done"]:
            raise OSError(errno.EIO, answer or "it was not done in time", path)
        return output

    async def _keep(self, state: ShellState) -> str:
        if not self._channel.sees:
            there = await self._provider.engine.call(lambda client: client.top(self._container))
            if len(there["Processes"]) > _SHELLS:
                self.kill("its processes do not end")
                raise self.shell.died()
        image = await self._provider.engine.call(lambda client: client.commit(self._container, pause=False)["Id"])
        return self._provider.remember(Snapshot(image, state))

    async def _over(self) -> str:
        used = await self._provider.sizes.of(self._container)
        limit = self.limits.disk_mb
        return f"it was killed at its limit on the disk, {limit} MiB" if used > limit << 20 else ""

    def _kill(self, why: str) -> None:
        self._channel.lose(why)
        self._provider.finish(self._provider.remove(self._container))

    async def _end(self) -> None:
        self._channel.lose("it was closed")
        await self._provider.remove(self._container)
        await self._provider.sweep()


def _execute(client: Any, container: str, words: list[str], data: bytes, most: int) -> bytes:
    """Run a program beside the shell, with `data` as its input; the frames of what it said, up to a little more than
    `most` bytes. Blocks, for _FILE_S at most; a program that has not ended then, or says too much, is killed. Raises
    OSError."""
    mark, user, until = secrets.token_hex(16), f"{USER}:{USER}", time.monotonic() + _FILE_S
    told = {"environment": {"HEADRACE_FILE": mark}, "user": user, "workdir": WORKSPACE}
    made = client.exec_create(container, words, stdin=True, **told)["Id"]
    found, ended = bytearray(), False
    answer = client.exec_start(made, socket=True)
    with own_connection(answer) as connection, contextlib.suppress(TimeoutError, BrokenPipeError):
        connection.settimeout(_FILE_S)
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        while not ended and len(found) <= most and (left := until - time.monotonic()) > 0:
            connection.settimeout(left)
            part = connection.recv(1 << 16)
            found += part
            ended = not part
    if not ended:
        # The daemon does not end what it executes, and knows its number only outside of the container.
        end = client.exec_create(container, ["/bin/sh", "-c", _END, "sh", mark], user=user)["Id"]
        client.exec_start(end, detach=True)
    return bytes(found)


def own_connection(answer: Any) -> socket.socket:
    """The connection behind what the SDK gives back, as a socket of our own."""
    with contextlib.closing(answer), contextlib.closing(getattr(answer, "_sock", answer)):
        return socket.socket(fileno=os.dup(answer.fileno()))
