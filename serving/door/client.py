"""The client of the token door: one replica, any number of requests in flight, over one connection at a time.

::

    generate ─► send ─► reply ─► acknowledged with the next frame
                 ▲ │
                 │ └── connection lost ─► [reconnect] dial, pause, dial, … ─► the same instance: send again what is open
                 └──────────────────────────────┘                         └─► refused, another one: EngineDead, the end
                                                         too late: EngineDead for what is open, and on with dialling

Owns the open requests. Each ends exactly once: with a generation, the replica's error, its deadline, its caller's
cancellation, or EngineDead when the replica is gone. A connection that is lost is no such end: what is open is sent
again under its key, and the replica answers with what it has kept (P24, case S7). Deadlines run on meanwhile. A replica
that is out of reach for too long offers no versions and is asked nothing; it may still be alive, and comes back.
"""

import asyncio
import math
import secrets
from collections.abc import Callable

from headrace.platform.errors import DeadlineExceeded, EngineDead, EngineError
from headrace.platform.records.generation import Generation, GenerationRequest
from headrace.serving.door.deadlines import DeadlineTimer
from headrace.serving.door.frames import QUEUE_LIMIT_BYTES, FrameError
from headrace.serving.door.handshake import ClientHandshake, DoorRefused
from headrace.serving.door.link import Link
from headrace.serving.door.messages import (
    Acknowledge,
    Cancel,
    Failure,
    Farewell,
    Goodbye,
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
_MAX_UNACKNOWLEDGED = 256
_RELEASES_KEPT = 1024
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5


class DoorClient:
    """A TokenGenerator behind a door. Made by `connect`.

    `replica` is the server's name. `closed` is set when the replica is gone, or this client was closed. `on_versions`
    is called whenever the replica announces what it holds, or the connection is lost or back; `on_closed` once at the
    end; both belong to whoever owns the client.

    Args:
        host, port: of the door.
        token: the shared secret.
        reconnect_s: for how long what is open waits for a lost connection.
    """

    def __init__(self, host: str, port: int, token: str, reconnect_s: float = 10.0) -> None:
        self._loop = asyncio.get_running_loop()
        self._host, self._port, self._token = host, port, token
        self._reconnect_s = reconnect_s
        self._name = secrets.token_hex(8)
        self._link: Link | None = None
        self._is_up = False
        self._open: dict[int, tuple[asyncio.Future[Generation], float, GenerationRequest]] = {}
        self._number = 0
        self._arrived: list[str] = []
        self._given_up: list[str] = []
        self._released: dict[str, None] = {}
        self._deadlines = DeadlineTimer(self._loop, self._sweep)
        self._reconnecting: asyncio.Task[None] | None = None
        self._up_s, self._pause_s = 0.0, _FIRST_PAUSE_S
        self._versions: tuple[int, ...] = ()
        self._why_lost = ""
        self._why_out_of_reach = ""
        self._instance = ""
        self.replica = ""
        self.is_draining = False
        self.retried = 0
        """Requests that were sent again under their key, as a connection was lost."""
        self.closed = asyncio.Event()
        self.on_versions: Callable[[], None] | None = None
        self.on_closed: Callable[[], None] | None = None

    @classmethod
    async def connect(
        cls, host: str, port: int, token: str, *, deadline_s: float = 10.0, reconnect_s: float = 10.0
    ) -> "DoorClient":
        """Connect and shake hands; returns when the replica has said which versions it holds.

        Raises:
            DoorRefused: wrong token, no common protocol, or no token door at all.
            DeadlineExceeded: no complete handshake within `deadline_s` (case X8).
            EngineDead: nobody listens there, or the connection was lost on the way.
        """
        client = cls(host, port, token, reconnect_s)
        try:
            async with asyncio.timeout(deadline_s):
                client._use(await client._dial())
        except TimeoutError as error:
            raise DeadlineExceeded(f"no handshake with {host}:{port} within {deadline_s} s") from error
        except OSError as error:
            raise EngineDead(f"no connection to {host}:{port}: {error}") from error
        if not client.is_connected:
            raise EngineDead(f"{host}:{port} has closed the connection")
        return client

    # --- TokenGenerator -----------------------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> Generation:
        """See TokenGenerator. Raises EngineError for a request that is larger than a frame may be."""
        due_s = self._loop.time() + request.deadline_s
        link = self._link
        if link is not None and link.queued_bytes > QUEUE_LIMIT_BYTES:
            await self._wait_for_room(link, request)
            link = self._link
        if self.closed.is_set():
            raise EngineDead(self._why_lost)
        if self._why_out_of_reach:
            raise EngineDead(self._why_out_of_reach)
        self._released.pop(request.session, None)
        self._number = number = self._number + 1
        body = encode_request(number, request, request.deadline_s)
        if self._is_up and link is not None:
            if self._arrived:
                self._acknowledge(link)
            link.send(body)
        future: asyncio.Future[Generation] = self._loop.create_future()
        self._open[number] = (future, due_s, request)
        if due_s < self._deadlines.next_s:
            self._deadlines.arm(due_s)
        try:
            return await future
        except asyncio.CancelledError:
            if self._open.pop(number, None) is not None:
                self._give_up(request.key)
            raise

    async def release(self, session: str) -> None:
        """See TokenGenerator. Does not wait for the replica."""
        self._released[session] = None
        if self._is_up and self._link is not None:
            if len(self._released) > _RELEASES_KEPT:
                del self._released[next(iter(self._released))]
            if self._arrived:
                self._acknowledge(self._link)
            self._link.send(encode(Release(session)))

    def versions(self) -> tuple[int, ...]:
        """What the replica announced last, oldest first; nothing while it is out of reach, and once it is gone."""
        return self._versions

    async def close(self) -> None:
        """End open requests with EngineDead and part from the replica. Safe to call twice."""
        self._why_lost = self._why_lost or "the connection was closed on this side"
        if self._reconnecting is not None:
            self._reconnecting.cancel()
            await asyncio.gather(self._reconnecting, return_exceptions=True)
        link = self._link
        if self.closed.is_set():
            return
        if link is None or not self._is_up:
            self._end("")
            return
        link.send(encode(Farewell()))
        link.finish()
        try:
            async with asyncio.timeout(_CLOSE_GRACE_S):
                await self.closed.wait()
        except TimeoutError:
            link.abort()
            await self.closed.wait()

    @property
    def open_requests(self) -> int:
        """Requests that wait for the replica."""
        return len(self._open)

    @property
    def is_connected(self) -> bool:
        """False while a lost connection is tried again: what is asked then waits for it."""
        return self._is_up

    async def _wait_for_room(self, link: Link, request: GenerationRequest) -> None:
        try:
            async with asyncio.timeout(request.deadline_s):
                await link.room()
        except TimeoutError as error:
            raise self._late(request.deadline_s) from error

    def _acknowledge(self, link: Link) -> None:
        """P24: these results need not be kept. It travels with whatever is sent next."""
        keys, self._arrived = tuple(self._arrived), []
        link.send(encode(Acknowledge(keys)))

    def _give_up(self, key: str) -> None:
        if self._is_up and self._link is not None:
            self._link.send(encode(Cancel(key)))
        else:
            self._given_up.append(key)

    # --- frames -------------------------------------------------------------------------------------------------------

    def received(self, body: bytes) -> None:
        """One frame of the server."""
        opened = self._open
        for message in decode_for_client(body):
            if type(message) is Reply:
                generation = generation_of(message)
                entry = opened.pop(message.number, None)
                if entry is not None:
                    self._arrived.append(entry[2].key)
                    if not entry[0].done():
                        entry[0].set_result(generation)
            elif type(message) is Failure:
                entry = opened.pop(message.number, None)
                if entry is not None and not entry[0].done():
                    entry[0].set_exception(error_of(message))
            elif type(message) is Versions:
                self._versions, self.is_draining = message.numbers, message.draining
                self._tell()
            elif type(message) is Goodbye:
                self._why_lost = self._why_lost or message.why
        if len(self._arrived) > _MAX_UNACKNOWLEDGED and self._is_up and self._link is not None:
            self._acknowledge(self._link)

    def _tell(self) -> None:
        if self.on_versions is not None:
            self.on_versions()

    def _sweep(self, now_s: float) -> float:
        late = [number for number, (_, due_s, _) in self._open.items() if due_s <= now_s]
        for number in late:
            future, _, request = self._open.pop(number)
            if not future.done():
                future.set_exception(self._late(request.deadline_s))
                self._give_up(request.key)
        return min((due_s for _, due_s, _ in self._open.values()), default=math.inf)

    def _late(self, deadline_s: float) -> DeadlineExceeded:
        return DeadlineExceeded(f"replica {self.replica} did not answer within {deadline_s} s")

    # --- connections --------------------------------------------------------------------------------------------------

    async def _dial(self) -> Link:
        """A new connection that has shaken hands. Raises OSError, DoorRefused, EngineDead."""
        _, link = await self._loop.create_connection(
            lambda: Link(self, ClientHandshake(self._token, client=self._name)), self._host, self._port
        )
        try:
            await link.ready
        except BaseException:  # a cancelled caller, too, leaves no half-made connection behind
            link.abort()
            raise
        return link

    def _use(self, link: Link) -> None:
        self._link, self._is_up = link, link.is_open
        self._up_s, self._why_out_of_reach = self._loop.time(), ""
        self.replica, self._instance = link.replica, link.instance

    def lost(self, link: Link, reason: str) -> None:
        """A connection is gone; only the one in use matters."""
        if link is not self._link or self.closed.is_set():
            return
        self._link, self._is_up = None, False
        if self._why_lost or link.failure is not None:  # closed here, a goodbye, or a server that breaks the protocol
            self._end(str(link.failure or reason))
            return
        self._reconnecting = asyncio.create_task(self._reconnect(reason), name="reconnect")
        self._tell()

    async def _reconnect(self, reason: str) -> None:
        """P24: the same instance knows what was asked; any other end is the replica's."""
        now_s = self._loop.time()
        until_s = now_s + self._reconnect_s
        if now_s - self._up_s > _LONGEST_PAUSE_S:
            self._pause_s = _FIRST_PAUSE_S
        else:  # whoever is cut off as soon as it is there does not storm the door
            await self._pause(until_s)
        while True:
            try:
                async with asyncio.timeout_at(until_s):
                    link = await self._dial()
                break
            except (ConnectionRefusedError, DoorRefused) as error:
                self._end(f"{reason}; then: {error}")
                return
            except (OSError, EngineError):  # a TimeoutError is an OSError
                await self._pause(until_s)
            if self._loop.time() >= until_s:
                self._out_of_reach(f"{reason}; not reached for {self._reconnect_s:g} s")
                until_s = self._loop.time() + self._reconnect_s
        if link.instance != self._instance:
            link.abort()
            self._end(f"{reason}; another one has taken its place")
            return
        self._use(link)
        if self._is_up:
            self._send_again(link)
        else:
            self.lost(link, reason)
        self._tell()

    async def _pause(self, until_s: float) -> None:
        await asyncio.sleep(min(self._pause_s, max(until_s - self._loop.time(), 0.0)))
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def _send_again(self, link: Link) -> None:
        given_up, self._given_up = self._given_up, []
        if self._arrived:
            self._acknowledge(link)
        for key in given_up:
            link.send(encode(Cancel(key)))
        now_s = self._loop.time()
        for number, (future, due_s, request) in list(self._open.items()):
            if future.done():
                continue
            try:
                link.send(encode_request(number, request, max(due_s - now_s, 0.0)))
                self.retried += 1
            except FrameError as error:
                del self._open[number]
                future.set_exception(error)
        for session in self._released:  # what was said last may be lost, and a session would stay there for ever
            link.send(encode(Release(session)))

    def _out_of_reach(self, reason: str) -> None:
        """Whoever waits for the replica goes elsewhere, until it is reached again."""
        if not self._why_out_of_reach:
            self._why_out_of_reach = f"replica {self.replica} is out of reach: {reason}"
            self._given_up += [request.key for _, _, request in self._open.values()]
            self._fail_open(self._why_out_of_reach)
            self._tell()

    def _end(self, reason: str) -> None:
        """The replica is gone: fail whatever is open, at once."""
        self._is_up = False
        self._why_lost = f"replica {self.replica or 'unknown'} is gone: {self._why_lost or reason}"
        self.closed.set()
        self._fail_open(self._why_lost)
        if self.on_closed is not None:
            self.on_closed()

    def _fail_open(self, why: str) -> None:
        self._deadlines.stop()
        self._versions = ()
        entries = list(self._open.values())
        self._open.clear()
        for future, _, _ in entries:
            if not future.done():
                future.set_exception(EngineDead(why))
