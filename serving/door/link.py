"""One connection of a client to its replica. It shakes hands, then hands over whole frames; it knows of no requests."""

import asyncio
from typing import Protocol

from headrace.platform.errors import EngineDead, EngineError
from headrace.serving.door.frames import MAX_FRAME_BYTES, FrameProtocol
from headrace.serving.door.handshake import HANDSHAKE_FRAME_BYTES, ClientHandshake


class LinkOwner(Protocol):
    """The client, whose connections come and go."""

    def received(self, body: bytes) -> None:
        """One frame after the handshake; the first says which versions the replica holds."""

    def lost(self, link: "Link", reason: str) -> None:
        """That connection is gone. Called once."""


class Link(FrameProtocol):
    """See the module. `ready` is done when the first frame after the handshake has been handed over; `failure` is what
    the server broke of the protocol, or why it refused."""

    def __init__(self, owner: LinkOwner, handshake: ClientHandshake) -> None:
        super().__init__(HANDSHAKE_FRAME_BYTES)
        self._owner = owner
        self._handshake = handshake
        self._is_shaken = False
        self.failure: EngineError | None = None
        self.ready: asyncio.Future[None] = self._loop.create_future()

    @property
    def replica(self) -> str:
        """The server's name, empty before the handshake is over."""
        return self._handshake.replica or ""

    @property
    def instance(self) -> str:
        """The name of this life of the server."""
        return self._handshake.instance

    @property
    def queued_bytes(self) -> int:
        """What waits to be written."""
        return self._queued_bytes

    def frame_received(self, body: bytes) -> None:
        """One frame of the server."""
        if self._is_shaken:
            self._owner.received(body)
            if not self.ready.done():
                self.ready.set_result(None)
            return
        answer = self._handshake.receive(body)
        if answer is not None:
            self.send_alone(answer)
        elif self._handshake.replica is not None:
            self._is_shaken = True
            self._reader.max_bytes = MAX_FRAME_BYTES

    def broken(self, error: EngineError) -> None:
        """The server refused, or does not speak the protocol."""
        self.failure = error
        self._fail(error)
        self.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Open the handshake."""
        super().connection_made(transport)
        self.send_alone(self._handshake.opening)

    def lost(self, reason: str) -> None:
        """The connection is gone."""
        self._fail(EngineDead(f"replica {self.replica or 'unknown'} is gone: {self.failure or reason}"))
        self._owner.lost(self, reason)

    def _fail(self, error: EngineError) -> None:
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # whoever dialled may already have given up, and then nobody looks
