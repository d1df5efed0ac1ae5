"""The way to a container's shell: the attached connection, whose frames carry standard output and error apart.

It owns the connection, and nothing of the container. What only the daemon can do (a signal, a look at why the container
is gone) is handed in by who made it, so that no Docker library is needed here.
"""

import asyncio
import contextlib
import math
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable

from headrace.actors.sandboxes.alarm import Alarm
from headrace.actors.sandboxes.family import Family
from headrace.actors.sandboxes.processes import Process, end_below, living
from headrace.actors.sandboxes.threads import ENDS, QUICK
from headrace.platform.errors import SandboxDied

_HEADER = struct.Struct(">BxxxL")
_STDERR = 2
_MOST_WAITING = 1 << 18
_POST_MORTEM_S = 0.1
_END_S = 5.0


class AttachedShell(asyncio.Protocol):
    """A `Channel` over the connection that `attach` gave: not a terminal, standard input, output and error.

    Args:
        interrupt: sends SIGUSR1 to the container's first process.
        limit_hit: see `Channel.limit_hit`.
        post_mortem: why the container is gone, empty where nobody knows; asked once, and not waited for long.
    """

    def __init__(
        self,
        interrupt: Callable[[], Awaitable[None]],
        limit_hit: Callable[[], Awaitable[str]],
        post_mortem: Callable[[], Awaitable[str]],
    ) -> None:
        self._ask_interrupt, self._ask_limit_hit, self._post_mortem = interrupt, limit_hit, post_mortem
        self._transport: asyncio.Transport | None = None
        self._frames: deque[tuple[bool, bytes]] = deque()
        self._waiting = 0
        self._header = bytearray()
        self._control, self._left = False, 0
        self._changed: asyncio.Future[None] | None = None
        self._late = Alarm(self._wake)
        self._room = asyncio.Event()
        self._room.set()
        self._gone = False
        self._why = ""
        self._family: Family | None = None

    async def open(self, connection: socket.socket) -> None:
        """Take the connection over."""
        connection.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: self, sock=connection)

    def follow(self, host_pid: int) -> None:
        """Name the container's first process, where it is one of this machine's that this process may end."""
        self._family = Family(host_pid)

    @property
    def alive(self) -> bool:
        """Whether the shell runs, as far as is known."""
        return not self._gone

    # What the shell asks for.

    async def write(self, data: bytes, until: float = math.inf) -> None:
        """See `Channel.write`."""
        if self._transport is not None and not self._gone:
            self._transport.write(data)
            if not self._room.is_set():
                async with asyncio.timeout_at(until if until < math.inf else None):
                    await self._room.wait()
        if self._gone:
            raise SandboxDied(f"the box is gone: {self.cause()}")

    async def read(self, until: float = math.inf, control: bool = True) -> tuple[bool, bytes]:
        """See `Channel.read`."""
        loop = asyncio.get_running_loop()
        while loop.time() < until:
            if self._frames:
                error, data = self._frames.popleft()
                self._waiting -= len(data)
                if self._transport is not None and not self._gone and self._waiting <= _MOST_WAITING // 2:
                    self._transport.resume_reading()
                return error, data
            if self._gone:
                await self._look_why()
                return False, b""
            self._late.set(until)
            self._changed = loop.create_future()
            await self._changed
        raise TimeoutError

    async def interrupt(self) -> None:
        """See `Channel.interrupt`."""
        if not self._gone:
            await self._ask_interrupt()

    @property
    def sees(self) -> bool:
        """See `Channel.sees`."""
        return self._family is not None

    async def below(self) -> frozenset[Process] | None:
        """See `Channel.below`."""
        if self._family is None:
            return None
        only = self._family.only_child()
        return only if only is not None else await QUICK.do(living, self._family.root)

    async def end_below(self, but: frozenset[Process]) -> bool:
        """See `Channel.end_below`."""
        return self._gone or self._family is None or await ENDS.do(end_below, self._family.root, _END_S, but)

    async def limit_hit(self) -> str:
        """See `Channel.limit_hit`."""
        return "" if self._gone else await self._ask_limit_hit()

    def cause(self) -> str:
        """See `Channel.cause`."""
        return self._why or "its container was killed, or ended"

    # What its owner asks for.

    def lose(self, why: str) -> None:
        """Cut the connection, and with it the shell's standard input; `why` becomes the cause, if there is none yet."""
        self._why = self._why or why
        self._end()
        if self._transport is not None:
            self._transport.abort()

    # What the transport says.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Cut what comes into the frames of the two streams."""
        view = memoryview(data)
        while view:
            if not self._left:
                missing = _HEADER.size - len(self._header)
                self._header += view[:missing]
                view = view[missing:]
                if len(self._header) < _HEADER.size:
                    break
                stream, self._left = _HEADER.unpack(self._header)
                self._control = stream == _STDERR
                self._header.clear()
                continue
            part, view = view[: self._left], view[self._left :]
            self._left -= len(part)
            self._frames.append((self._control, bytes(part)))
            self._waiting += len(part)
        if self._waiting > _MOST_WAITING and self._transport is not None:
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._end()

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._room.clear()

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._room.set()

    def _end(self) -> None:
        self._gone = True
        self._late.stop()
        if self._family is not None:
            self._family.close()
        self._room.set()
        self._wake()

    def _wake(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    async def _look_why(self) -> None:
        if self._why:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_POST_MORTEM_S):
                self._why = await self._post_mortem()
        self._why = self._why or self.cause()
