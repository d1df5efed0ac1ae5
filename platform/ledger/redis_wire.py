"""One connection that many calls share: requests go out as they come, replies come back in the same order.

redis-py opens it (address, TLS, user, database) and hiredis packs and parses; this replaces the part between them, for
a call through a pool of connections costs several times as much as the server's own work. Whoever has a wire knows that
the server has not restarted since it was opened: with the server the connection ends.

Calls that block on the server do not belong here: they would hold up all others.
"""

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import hiredis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

_READ_BYTES = 256 * 1024
_LARGE_BYTES = 4096


class Wire(asyncio.BufferedProtocol):
    """An open connection. Make one with `open`. `loaded` is for its owner: the scripts that the server has."""

    def __init__(self, connection: Any) -> None:
        self.loaded: set[str] = set()
        self._connection = connection
        self._transport: asyncio.Transport = connection._writer.transport
        self._buffer = memoryview(bytearray(_READ_BYTES))  # a view: asyncio's TLS writes into slices of it
        self._reader: Any = hiredis.Reader(replyError=ResponseError)
        self._waiting: deque[asyncio.Future[Any]] = deque()
        self._gone = asyncio.Event()

    @classmethod
    async def open(cls, pool: Any) -> "Wire":
        """Open a connection as `pool` would. Raises what redis-py raises."""
        connection = pool.make_connection()
        try:
            await connection.connect()
        except BaseException:
            await connection.disconnect(nowait=True)
            await asyncio.sleep(0)  # it is gone after one turn of the loop
            raise
        wire = cls(connection)
        # Nothing is under way: redis-py has read the last reply to its greeting.
        wire._transport.set_protocol(wire)
        return wire

    @property
    def is_closed(self) -> bool:
        """The server, or this side, has ended the connection."""
        return self._transport.is_closing()

    async def call(self, timeout_s: float, *commands: Sequence[Any]) -> Any:
        """Send commands, one after the other and nothing in between, and return the reply to the last.

        That may be a ResponseError: the server says no.

        Raises:
            ResponseError: it says no to one before the last.
            ConnectionError, TimeoutError: redis-py's; what was sent may or may not have been done. A reply that does
                not come in time ends the connection, for all calls.
        """
        if self.is_closed:
            raise RedisConnectionError("the connection is closed")
        loop = asyncio.get_running_loop()
        replies: list[asyncio.Future[Any]] = [loop.create_future() for _ in commands]
        self._waiting.extend(replies)
        for command in commands:
            for piece in _pieces(command):
                self._transport.write(piece)
        try:
            async with asyncio.timeout(timeout_s):
                await replies[-1]
        except TimeoutError as error:
            await self.close()
            raise RedisTimeoutError(f"no reply within {timeout_s:g} s") from error
        for reply in replies[:-1]:
            if isinstance(reply.result(), ResponseError):
                raise reply.result()
        return replies[-1].result()

    async def close(self) -> None:
        """End the connection; calls that wait fail."""
        self._transport.abort()
        await self._gone.wait()
        await self._connection.disconnect(nowait=True)

    # --- asyncio.BufferedProtocol -------------------------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the transport puts what it has read."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Hand out the replies that are complete."""
        self._reader.feed(self._buffer, 0, nbytes)
        while (value := self._reader.gets()) is not False:
            reply = self._waiting.popleft()
            if not reply.done():  # a cancelled call leaves its place in the line
                reply.set_result(value)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail all calls that wait."""
        self._gone.set()
        lost = RedisConnectionError(f"the connection was lost: {exc or 'closed by the server'}")
        for reply in self._waiting:
            if not reply.done():
                reply.set_exception(lost)
                reply.exception()  # only the last of several is waited for
        self._waiting.clear()


def _pieces(command: Sequence[Any]) -> Iterator[bytes]:
    """The bytes of a command. Large values stay as they are: one more copy of them costs more than one more write."""
    large = [i for i, value in enumerate(command) if isinstance(value, bytes) and len(value) > _LARGE_BYTES]
    if not large:
        yield hiredis.pack_command(tuple(command))
        return
    head, begun = b"*%d\r\n" % len(command), 0
    for i in large:
        yield head + _bulk(command[begun:i]) + b"$%d\r\n" % len(command[i])
        yield command[i]
        head, begun = b"\r\n", i + 1
    yield head + _bulk(command[begun:])


def _bulk(values: Sequence[Any]) -> bytes:
    """Arguments without the count of them that begins a command."""
    return hiredis.pack_command(tuple(values)).partition(b"\r\n")[2] if values else b""
