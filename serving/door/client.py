"""The client of the token door: one connection to one replica, any number of requests in flight.

Owns the open requests of this connection. Each ends exactly once: with a generation, the replica's error, its
deadline, its caller's cancellation, or EngineDead the moment the connection is lost.
"""

import asyncio
import math
from collections.abc import Callable

from headrace.platform.errors import DeadlineExceeded, EngineDead, EngineError
from headrace.platform.records.generation import Generation, GenerationRequest
from headrace.serving.door.deadlines import DeadlineTimer
from headrace.serving.door.frames import MAX_FRAME_BYTES, QUEUE_LIMIT_BYTES, FrameProtocol
from headrace.serving.door.handshake import HANDSHAKE_FRAME_BYTES, ClientHandshake
from headrace.serving.door.messages import (
    Cancel,
    Failure,
    Release,
    Reply,
    Versions,
    decode_for_client,
    encode,
    encode_request,
    error_of,
    generation_of,
)

_CLOSE_GRACE_S = 1.0


class DoorClient(FrameProtocol):
    """A TokenGenerator over a connection. Made by `connect`.

    `replica` is the server's name. `closed` is set when the connection is gone. `on_versions` is called whenever the
    replica announces what it holds, `on_closed` once at the end; both belong to whoever owns the client.
    """

    def __init__(self, handshake: ClientHandshake) -> None:
        super().__init__(HANDSHAKE_FRAME_BYTES)
        self._handshake: ClientHandshake | None = handshake
        self._open: dict[int, tuple[asyncio.Future[Generation], float, float]] = {}
        self._number = 0
        self._deadlines = DeadlineTimer(self._loop, self._sweep)
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._versions: tuple[int, ...] = ()
        self._why_lost = ""
        self.replica = ""
        self.closed = asyncio.Event()
        self.on_versions: Callable[[], None] | None = None
        self.on_closed: Callable[[], None] | None = None

    @classmethod
    async def connect(cls, host: str, port: int, token: str, *, deadline_s: float = 10.0) -> "DoorClient":
        """Connect and shake hands; returns when the replica has said which versions it holds.

        Raises:
            DoorRefused: wrong token, no common protocol, or no token door at all.
            DeadlineExceeded: no complete handshake within `deadline_s` (case X8).
            EngineDead: nobody listens there, or the connection was lost on the way.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(deadline_s):
                _, client = await loop.create_connection(lambda: cls(ClientHandshake(token)), host, port)
                try:
                    await client._ready
                except BaseException:  # a cancelled caller, too, leaves no half-made connection behind
                    client.abort()
                    raise
        except TimeoutError as error:
            raise DeadlineExceeded(f"no handshake with {host}:{port} within {deadline_s} s") from error
        except OSError as error:
            raise EngineDead(f"no connection to {host}:{port}: {error}") from error
        return client

    # --- TokenGenerator -----------------------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> Generation:
        """See TokenGenerator. Raises EngineError for a request that is larger than a frame may be."""
        due_s = self._loop.time() + request.deadline_s
        if self._queued_bytes > QUEUE_LIMIT_BYTES:
            await self._wait_for_room(request)
        if self.closed.is_set():
            raise EngineDead(self._why_lost)
        self._number = number = self._number + 1
        self.send(encode_request(number, request))
        future: asyncio.Future[Generation] = self._loop.create_future()
        self._open[number] = (future, due_s, request.deadline_s)
        if due_s < self._deadlines.next_s:
            self._deadlines.arm(due_s)
        try:
            return await future
        except asyncio.CancelledError:
            if self._open.pop(number, None) is not None:
                self.send(encode(Cancel(number)))
            raise

    async def release(self, session: str) -> None:
        """See TokenGenerator. Does not wait for the replica."""
        if self.is_open:
            self.send(encode(Release(session)))

    def versions(self) -> tuple[int, ...]:
        """What the replica announced last, oldest first; nothing once the connection is gone."""
        return self._versions

    async def close(self) -> None:
        """End open requests with EngineDead and part from the replica. Safe to call twice."""
        self._why_lost = self._why_lost or "the connection was closed on this side"
        self.finish()
        try:
            async with asyncio.timeout(_CLOSE_GRACE_S):
                await self.closed.wait()
        except TimeoutError:
            self.abort()
            await self.closed.wait()

    @property
    def open_requests(self) -> int:
        """Requests that wait for the replica."""
        return len(self._open)

    async def _wait_for_room(self, request: GenerationRequest) -> None:
        try:
            async with asyncio.timeout(request.deadline_s):
                await self.room()
        except TimeoutError as error:
            raise self._late(request.deadline_s) from error

    # --- frames -------------------------------------------------------------------------------------------------------

    def frame_received(self, body: bytes) -> None:
        """One frame of the server."""
        if self._handshake is not None:
            self._shake(self._handshake, body)
            return
        opened = self._open
        for message in decode_for_client(body):
            if type(message) is Reply:
                generation = generation_of(message)
                entry = opened.pop(message.number, None)
                if entry is not None and not entry[0].done():
                    entry[0].set_result(generation)
            elif type(message) is Failure:
                entry = opened.pop(message.number, None)
                if entry is not None and not entry[0].done():
                    entry[0].set_exception(error_of(message))
            elif type(message) is Versions:
                self._announced(message.numbers)

    def _announced(self, versions: tuple[int, ...]) -> None:
        self._versions = versions
        if not self._ready.done():
            self._ready.set_result(None)
        if self.on_versions is not None:
            self.on_versions()

    def _shake(self, handshake: ClientHandshake, body: bytes) -> None:
        answer = handshake.receive(body)
        if answer is not None:
            self.send_alone(answer)
        elif handshake.replica is not None:
            self.replica = handshake.replica
            self._handshake = None
            self._reader.max_bytes = MAX_FRAME_BYTES

    def broken(self, error: EngineError) -> None:
        """The server refused, or does not speak the protocol."""
        self._why_lost = str(error)
        if not self._ready.done():
            self._ready.set_exception(error)
        self.abort()

    def _sweep(self, now_s: float) -> float:
        late = [number for number, (_, due_s, _) in self._open.items() if due_s <= now_s]
        for number in late:
            future, _, deadline_s = self._open.pop(number)
            if not future.done():
                future.set_exception(self._late(deadline_s))
                self.send(encode(Cancel(number)))
        return min((due_s for _, due_s, _ in self._open.values()), default=math.inf)

    def _late(self, deadline_s: float) -> DeadlineExceeded:
        return DeadlineExceeded(f"replica {self.replica} did not answer within {deadline_s} s")

    # --- the connection -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Open the handshake."""
        super().connection_made(transport)
        if self._handshake is not None:
            self.send_alone(self._handshake.opening)

    def lost(self, reason: str) -> None:
        """Fail whatever is open, at once."""
        self._deadlines.stop()
        self._why_lost = f"replica {self.replica or 'unknown'} is gone: {self._why_lost or reason}"
        self._versions = ()
        self.closed.set()
        if not self._ready.done():
            self._ready.set_exception(EngineDead(self._why_lost))
            self._ready.exception()  # `connect` may already have given up, and then nobody looks
        entries = list(self._open.values())
        self._open.clear()
        for future, _, _ in entries:
            if not future.done():
                future.set_exception(EngineDead(self._why_lost))
        if self.on_closed is not None:
            self.on_closed()
