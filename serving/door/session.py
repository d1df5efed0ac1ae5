"""The server's end of one client connection: the handshake, back-pressure, and what the client says.

Its requests are the desk's (desk.py), which outlive the connection. Nothing is listened to before the handshake has
succeeded in time.
"""

import logging
from typing import TYPE_CHECKING

from headrace.platform.errors import EngineError
from headrace.serving.door.desk import Desk, Guest
from headrace.serving.door.frames import MAX_FRAME_BYTES, FrameProtocol
from headrace.serving.door.handshake import HANDSHAKE_FRAME_BYTES, DoorRefused, RefusalReason, ServerHandshake, refusal
from headrace.serving.door.messages import (
    Acknowledge,
    Ask,
    Cancel,
    Farewell,
    Goodbye,
    Release,
    Versions,
    decode_for_server,
    encode,
)

if TYPE_CHECKING:
    from headrace.serving.door.server import DoorServer

_log = logging.getLogger(__name__)


class Session(FrameProtocol):
    """One connection, from its handshake to its end."""

    def __init__(self, server: "DoorServer", desk: Desk, handshake: ServerHandshake) -> None:
        super().__init__(HANDSHAKE_FRAME_BYTES)
        self._server = server
        self._desk = desk
        self._handshake: ServerHandshake | None = handshake
        self._guest = Guest("")
        self._limit = self._loop.call_later(server.handshake_deadline_s, self._never_proved)
        self.gone = self._loop.create_future()

    def announce(self, versions: Versions) -> None:
        """Tell the client what can be asked for."""
        if self._handshake is None and self.is_open:
            self.send(encode(versions))

    def end(self, why: str) -> None:
        """Say that the replica ends, send what is queued, and close."""
        if self._handshake is None and self.is_open:
            self.send(encode(Goodbye(why)))
        self.finish()

    # --- frames -------------------------------------------------------------------------------------------------------

    def frame_received(self, body: bytes) -> None:
        """One frame of the client."""
        if self._handshake is not None:
            self._shake(self._handshake, body)
            return
        desk = self._desk
        for message in decode_for_server(body):
            if type(message) is Ask:
                desk.ask(self._guest, message, self._received_s)
            elif type(message) is Acknowledge:
                desk.acknowledge(message.keys)
            elif type(message) is Release:
                desk.release(message.session)
            elif type(message) is Cancel:
                desk.cancel(message.key)
            elif type(message) is Farewell:
                self._guest.is_leaving = True

    def _shake(self, handshake: ServerHandshake, body: bytes) -> None:
        answer = handshake.receive(body)
        self.send_alone(answer)
        if handshake.done:
            self._handshake = None
            self._limit.cancel()
            self._reader.max_bytes = MAX_FRAME_BYTES
            self._guest = self._desk.arrive(handshake.client, self)
            self.announce(self._server.announcement())

    def broken(self, error: EngineError) -> None:
        """Say why, where the peer can still understand it, and cut the connection."""
        if self._handshake is None:
            _log.warning("door %s: client cut off: %s", self._server.replica, error)
            self.abort()
            return
        if not isinstance(error, DoorRefused):
            error = DoorRefused(str(error), RefusalReason.MALFORMED)
        self._server.count_refusal(error)
        self.send_alone(refusal(error))
        self.finish()

    # --- a slow peer --------------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        """The client does not read: take no more from it, and give it a limited time."""
        super().pause_writing()
        if self._transport is not None:
            self._transport.pause_reading()
        self._limit.cancel()
        self._limit = self._loop.call_later(self._server.stall_deadline_s, self._never_read)

    def resume_writing(self) -> None:
        """The client reads again."""
        self._limit.cancel()
        super().resume_writing()
        if self._transport is not None and not self._paused:
            self._transport.resume_reading()

    def _never_proved(self) -> None:
        self._server.count_refusal(DoorRefused("no handshake within its deadline", RefusalReason.TOO_SLOW))
        self.abort()

    def _never_read(self) -> None:
        _log.warning("door %s: client cut off: it does not read its replies", self._server.replica)
        self.abort()

    # --- the end ------------------------------------------------------------------------------------------------------

    def lost(self, reason: str) -> None:
        """The connection is gone."""
        self._limit.cancel()
        self._desk.leave(self._guest, self)
        self._server.left(self)
        if not self.gone.done():
            self.gone.set_result(None)
