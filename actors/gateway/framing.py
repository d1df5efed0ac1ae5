"""Frames on a stream: a 4-byte length (big-endian), then msgpack. Both ends of the gateway's socket speak so.

Owns the cutting of what arrives into messages, and the gathering of what is sent: whatever one tick of the loop sends
leaves in one write, because a system call costs more than a frame. Nothing here starts a task. A frame that is too
large, or that is none of the expected messages, ends the connection: whoever sent it is no peer.
"""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import msgspec

from headrace.actors.gateway.protocol import MAX_FRAME

_HEAD = 4
_NO_HEAD = bytes(_HEAD)
_HIGH_WATER = 4 * 1024 * 1024
_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode


class FrameTooLarge(ValueError):
    """A message that no peer would take."""


class Wire(asyncio.Protocol):
    """One end of a connection. Subclasses take messages in `received` and the end in `lost`.

    Args:
        decode: from the bytes of a frame to a message; raises ValueError for what is none.
        loop: the one that runs.
    """

    def __init__(self, decode: Callable[[memoryview], Any], loop: asyncio.AbstractEventLoop) -> None:
        self._decode, self._loop = decode, loop
        self._transport: asyncio.Transport | None = None
        self._arrived = bytearray()
        self._leaving = bytearray()
        self._leaves_soon = False
        self.is_slow = False
        """The other side reads more slowly than this one sends."""
        self.fault = ""
        """Why the connection ended, where this side ended it."""

    def made(self, transport: asyncio.Transport) -> None:
        """The connection is up."""

    def received(self, message: Any) -> None:
        """A message, whole."""

    def slowed(self) -> None:
        """`is_slow` has changed."""

    def lost(self) -> None:
        """The connection is gone."""

    @property
    def is_up(self) -> bool:
        """Whether what is sent has a way."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def held_bytes(self) -> int:
        """Size of what waits to be sent."""
        return len(self._leaving)

    def send(self, message: msgspec.Struct) -> None:
        """Send at the end of this tick of the loop; without effect on a connection that is gone.

        Raises:
            FrameTooLarge, OverflowError, UnicodeEncodeError: it cannot be sent, and nothing of it was.
        """
        self.hold(message)
        if not self._leaves_soon:
            self._leaves_soon = True
            self._loop.call_soon(self.leave)

    def hold(self, message: msgspec.Struct) -> None:
        """Send together with whatever is sent next, or with `leave`. Raises as `send`."""
        if self._transport is None:
            return
        leaving = self._leaving
        begin = len(leaving)
        leaving += _NO_HEAD
        try:
            _encoder.encode_into(message, leaving, begin + _HEAD)
            length = len(leaving) - begin - _HEAD
            if length > MAX_FRAME:
                raise FrameTooLarge(f"a message of {length} bytes is over the limit of {MAX_FRAME}")
        except BaseException:
            del leaving[begin:]
            raise
        leaving[begin : begin + _HEAD] = length.to_bytes(_HEAD, "big")

    def end(self, why: str = "") -> None:
        """Close the connection, after what was sent has left."""
        self.fault = self.fault or why
        self.leave()
        if self._transport is not None:
            self._transport.close()

    def abort(self, why: str) -> None:
        """Close the connection now."""
        self.fault = self.fault or why
        if self._transport is not None:
            self._transport.abort()

    def leave(self) -> None:
        """Send what waits."""
        self._leaves_soon = False
        leaving, self._leaving = self._leaving, bytearray()
        if leaving and self._transport is not None and not self._transport.is_closing():
            self._transport.write(leaving)

    # --- asyncio.Protocol ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        made = cast(asyncio.Transport, transport)  # of uvloop, which Ray's workers have, it is no subclass
        made.set_write_buffer_limits(high=_HIGH_WATER)
        self._transport = made
        self.made(made)

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        arrived: bytes | bytearray = data
        if self._arrived:
            self._arrived += data
            arrived = self._arrived
        view, begin = memoryview(arrived), 0
        try:
            while (left := len(view) - begin) >= _HEAD:
                length = int.from_bytes(view[begin : begin + _HEAD], "big")
                if length > MAX_FRAME:
                    raise FrameTooLarge(f"a frame of {length} bytes is over the limit of {MAX_FRAME}")
                if left < _HEAD + length:
                    break
                begin += _HEAD + length
                self.received(self._decode(view[begin - length : begin]))
                if self._transport is None or self._transport.is_closing():
                    return
        except ValueError as error:  # msgspec's errors are of this kind too
            self.abort(f"not a message: {error}")
            return
        finally:
            view.release()
        if arrived is self._arrived:
            del self._arrived[:begin]
        elif begin < len(arrived):
            self._arrived += arrived[begin:]

    def pause_writing(self) -> None:
        """See asyncio."""
        self.is_slow = True
        self.slowed()

    def resume_writing(self) -> None:
        """See asyncio."""
        self.is_slow = False
        self.slowed()

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio."""
        self.fault = self.fault or (str(error) if error is not None else "closed by the other side")
        self._transport = None
        self._arrived, self._leaving = bytearray(), bytearray()
        self.lost()
