"""The server's end of one client connection.

Owns the requests of this client: each runs as one task and ends exactly once, with a reply, a failure, or in silence
when the client cancelled it or is gone. Nothing is listened to before the handshake has succeeded in time.
"""

import asyncio
import logging
import math
from typing import TYPE_CHECKING

from headrace.platform.contracts import TokenGenerator
from headrace.platform.errors import DeadlineExceeded, EngineError
from headrace.platform.records.generation import GenerationRequest
from headrace.serving.door.deadlines import DeadlineTimer
from headrace.serving.door.frames import MAX_FRAME_BYTES, FrameError, FrameProtocol
from headrace.serving.door.handshake import HANDSHAKE_FRAME_BYTES, DoorRefused, RefusalReason, ServerHandshake, refusal
from headrace.serving.door.messages import (
    Ask,
    Cancel,
    Release,
    Versions,
    decode_for_server,
    encode,
    encode_generation,
    failure_of,
    request_of,
)

if TYPE_CHECKING:
    from headrace.serving.door.server import DoorServer

MAX_OPEN_REQUESTS = 65_536
"""Requests that one client may have open."""

_log = logging.getLogger(__name__)


class Session(FrameProtocol):
    """One client, from its handshake to its end."""

    def __init__(self, server: "DoorServer", engine: TokenGenerator, handshake: ServerHandshake) -> None:
        super().__init__(HANDSHAKE_FRAME_BYTES)
        self._server = server
        self._engine = engine
        self._handshake: ServerHandshake | None = handshake
        self._open: dict[int, tuple[asyncio.Task[None], float]] = {}
        self._releasing: set[asyncio.Task[None]] = set()
        self._deadlines = DeadlineTimer(self._loop, self._sweep)
        self._limit = self._loop.call_later(server.handshake_deadline_s, self._never_proved)
        self.gone = self._loop.create_future()

    @property
    def open_requests(self) -> int:
        """Requests that are running."""
        return len(self._open)

    def announce(self, versions: tuple[int, ...]) -> None:
        """Tell the client what can be asked for."""
        if self._handshake is None and self.is_open:
            self.send(encode(Versions(versions)))

    def end(self) -> None:
        """Cancel what runs, send what is queued, and close."""
        self._cancel_all()
        self.finish()

    # --- frames -------------------------------------------------------------------------------------------------------

    def frame_received(self, body: bytes) -> None:
        """One frame of the client."""
        if self._handshake is not None:
            self._shake(self._handshake, body)
            return
        for message in decode_for_server(body):
            if type(message) is Ask:
                self._ask(message)
            elif type(message) is Cancel:
                entry = self._open.pop(message.number, None)
                if entry is not None:
                    entry[0].cancel()
            elif type(message) is Release:
                task = self._loop.create_task(self._release(message.session))
                self._releasing.add(task)
                task.add_done_callback(self._releasing.discard)

    def _shake(self, handshake: ServerHandshake, body: bytes) -> None:
        answer = handshake.receive(body)
        self.send_alone(answer)
        if handshake.done:
            self._handshake = None
            self._limit.cancel()
            self._reader.max_bytes = MAX_FRAME_BYTES
            self.announce(self._server.versions())

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

    # --- requests -----------------------------------------------------------------------------------------------------

    def _ask(self, ask: Ask) -> None:
        number = ask.number
        if number in self._open:
            raise FrameError(f"request {number} is already open")
        if len(self._open) >= MAX_OPEN_REQUESTS:
            error = EngineError(f"more than {MAX_OPEN_REQUESTS} open requests on one connection")
            self.send(encode(failure_of(number, error)))
            return
        due_s = self._received_s + ask.deadline_s
        if due_s < self._deadlines.next_s:
            self._deadlines.arm(due_s)
        task = asyncio.Task(self._serve(number, request_of(ask)), loop=self._loop, name="door")
        self._open[number] = (task, due_s)

    async def _serve(self, number: int, request: GenerationRequest) -> None:
        try:
            body = encode_generation(number, await self._engine.generate(request))
        except asyncio.CancelledError:
            if number not in self._open:
                raise
            body = encode(failure_of(number, EngineError("the engine cancelled the request")))
        except Exception as error:  # the engine boundary: whatever it raises crosses as a typed failure
            if not isinstance(error, EngineError | DeadlineExceeded):
                _log.exception("door %s: request %s failed", self._server.replica, request.key)
            body = encode(failure_of(number, error))
        if self._open.pop(number, None) is None:
            return
        try:
            self.send(body)
        except FrameError as error:
            self.send(encode(failure_of(number, error)))

    async def _release(self, session: str) -> None:
        try:
            await self._engine.release(session)
        except Exception:  # the engine boundary: a session that cannot be released is the engine's loss only
            _log.exception("door %s: release of %s failed", self._server.replica, session)

    def _sweep(self, now_s: float) -> float:
        late = [number for number, (_, due_s) in self._open.items() if due_s <= now_s]
        for number in late:
            task, _ = self._open.pop(number)
            task.cancel()
            self.send(encode(failure_of(number, DeadlineExceeded("the generation did not end within its deadline"))))
        return min((due_s for _, due_s in self._open.values()), default=math.inf)

    def _cancel_all(self) -> None:
        self._deadlines.stop()
        self._limit.cancel()
        tasks = [task for task, _ in self._open.values()]
        self._open.clear()
        for task in (*tasks, *self._releasing):
            task.cancel()

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

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The client is here."""
        super().connection_made(transport)
        self._server.joined(self)

    def lost(self, reason: str) -> None:
        """The client is gone, and its requests with it."""
        self._cancel_all()
        self._server.left(self)
        if not self.gone.done():
            self.gone.set_result(None)
