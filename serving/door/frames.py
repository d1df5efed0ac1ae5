"""Frames over one byte stream: a u32 little-endian length, then that many bytes.

Owns cutting the stream into frames, the size bound, writing, and back-pressure. What is inside a message is up to the
subclass; a frame holds either one message (the handshake) or a msgpack array of them. Messages of one turn of the
event loop share frames, and all their frames leave in one write: with many requests in flight it is calls, of the
system and of Python, and not bytes that cost. A stream that breaks these rules cannot be trusted any further and is
cut.
"""

import asyncio
import struct
from collections.abc import Iterator
from typing import cast

import msgspec

from headrace.platform.errors import EngineError

MAX_FRAME_BYTES = 16 << 20
"""Largest frame between peers that know each other: four million token ids."""

BATCH_BYTES = 32 << 10
"""A frame takes no further messages once it holds this much, so that the receiver can start on it."""

RECEIVE_BYTES = 64 << 10
"""Bytes taken in at once: enough to share a system call, few enough that what they start stays in the cache."""

QUEUE_LIMIT_BYTES = 8 << 20
"""With more than this waiting to be written, new requests wait."""

_HEADER = struct.Struct("<I")
_HEADER_BYTES = _HEADER.size
_ARRAY = struct.Struct(">BI")
_ARRAY_CODE = 0xDD
"""msgpack's array with a u32 count; the messages follow."""


class FrameError(EngineError):
    """A frame over the size bound, or bytes that are no message of the protocol."""


class FrameReader:
    """Cuts a byte stream into frames, however it was chunked. `max_bytes` may change between two frames."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._rest = bytearray()
        self._needed = 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The frames that `data` completes. Read it to its end before the next call.

        Raises:
            FrameError: a frame announces more than `max_bytes`. Nothing of it is kept.
        """
        if self._rest:
            self._rest += data
            if len(self._rest) < self._needed:
                return
            data = bytes(self._rest)
            self._rest.clear()
        start, end = 0, len(data)
        while end - start >= _HEADER_BYTES:
            (length,) = _HEADER.unpack_from(data, start)
            if length > self.max_bytes:
                raise FrameError(f"a frame of {length} bytes; the limit is {self.max_bytes}")
            body = start + _HEADER_BYTES
            if end - body < length:
                self._needed = _HEADER_BYTES + length
                break
            start = body + length
            yield data[body:start]
        else:
            self._needed = _HEADER_BYTES
        if start < end:
            self._rest += data[start:]


class FrameProtocol(asyncio.BufferedProtocol):
    """One end of a connection that speaks in frames. Subclasses implement `frame_received` and `lost`."""

    def __init__(self, max_frame_bytes: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader(max_frame_bytes)
        self._received_s = 0.0
        self._received = memoryview(bytearray(RECEIVE_BYTES))
        self._transport: asyncio.Transport | None = None
        self._batch: list[bytes] = []
        self._batch_bytes = 0
        self._out: list[bytes] = []
        self._queued_bytes = 0
        self._paused = False
        self._room: asyncio.Future[None] | None = None

    def frame_received(self, body: bytes) -> None:
        """Handle one frame.

        Raises:
            EngineError, msgspec.DecodeError, ValueError: the peer broke the protocol; the connection is cut.
        """
        raise NotImplementedError

    def lost(self, reason: str) -> None:
        """The connection is gone. Called once."""
        raise NotImplementedError

    @property
    def is_open(self) -> bool:
        """Frames can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def send(self, message: bytes) -> None:
        """Queue one message; it leaves at the end of this turn of the loop, or when the peer has made room.

        Raises:
            FrameError: `message` is over the limit; nothing is sent.
        """
        size = len(message)
        if size > MAX_FRAME_BYTES - _ARRAY.size:
            raise FrameError(f"a message of {size} bytes; the limit is {MAX_FRAME_BYTES - _ARRAY.size}")
        if self._batch_bytes + size > BATCH_BYTES:
            self._seal()
        if not self._batch and not self._out:
            self._loop.call_soon(self._flush)
        self._batch.append(message)
        self._batch_bytes += size

    def send_alone(self, message: bytes) -> None:
        """Send one message as a whole frame, now. For the handshake, before anything is queued."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(_HEADER.pack(len(message)) + message)

    async def room(self) -> None:
        """Wait until the queue is below its limit. Returns at once when the connection is lost."""
        while self._queued_bytes > QUEUE_LIMIT_BYTES and self.is_open:
            if self._room is None:
                self._room = self._loop.create_future()
            await asyncio.shield(self._room)

    def finish(self) -> None:
        """Send what is queued, then close."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close now; what is queued is lost."""
        if self._transport is not None:
            self._transport.abort()

    def _seal(self) -> None:
        """Make a frame of the batch."""
        batch = self._batch
        if not batch:
            return
        size = _ARRAY.size + self._batch_bytes
        self._out.append(_HEADER.pack(size) + _ARRAY.pack(_ARRAY_CODE, len(batch)))
        self._out += batch
        self._queued_bytes += size
        batch.clear()
        self._batch_bytes = 0

    def _flush(self) -> None:
        self._seal()
        if self._paused or not self._out:
            return
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(self._out))
        self._forget_queue()

    def _forget_queue(self) -> None:
        self._batch.clear()
        self._batch_bytes = 0
        self._out.clear()
        self._queued_bytes = 0
        if self._room is not None:
            self._room.set_result(None)
            self._room = None

    # --- asyncio.Protocol ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is up."""
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go."""
        return self._received

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes came in."""
        self._received_s = self._loop.time()
        try:
            for body in self._reader.feed(bytes(self._received[:nbytes])):
                self.frame_received(body)
        except EngineError as error:
            self.broken(error)
        except (msgspec.DecodeError, ValueError) as error:
            self.broken(FrameError(f"no message of the protocol: {error}"))

    def broken(self, error: EngineError) -> None:
        """The peer broke the protocol: cut the connection."""
        self.abort()

    def pause_writing(self) -> None:
        """The peer is slow: hold frames back."""
        self._paused = True

    def resume_writing(self) -> None:
        """The peer has caught up."""
        self._paused = False
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is down."""
        self._forget_queue()
        self.lost(f"connection lost: {exc}" if exc else "connection closed by the peer")
