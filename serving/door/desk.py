"""What the clients of a door have asked for, whichever connection they have at the moment.

Owns the requests: each runs as one task and ends exactly once, with a reply, a failure, or in silence when the client
cancelled it or is gone. A result is kept under its key until the client has acknowledged it or its deadline is over;
who asks again under that key, on whatever connection, gets it, or attaches to the running generation, so that nothing
that was sampled is sampled twice (P24, case S7). A client that is gone for longer than the grace loses its requests and
its sessions. Owns draining, too: a door that drains takes no new session.
"""

import asyncio
import logging
import math
from collections.abc import Sequence
from typing import Protocol

from headrace.platform.contracts import TokenGenerator
from headrace.platform.errors import DeadlineExceeded, EngineError, VersionUnavailable
from headrace.platform.records.generation import Generation, GenerationRequest
from headrace.serving.door.deadlines import DeadlineTimer
from headrace.serving.door.frames import FrameError
from headrace.serving.door.messages import Ask, encode, encode_generation, failure_of, request_of

MAX_REQUESTS = 65_536
"""Requests of one door that run or whose results are kept."""

_log = logging.getLogger(__name__)


class Connection(Protocol):
    """Where a client can be reached now."""

    def send(self, message: bytes) -> None:
        """Queue one message. Raises FrameError when it is too large."""

    def abort(self) -> None:
        """End the connection."""


class Guest:
    """A client across its connections. Without one it may come back until `expiry`."""

    __slots__ = ("connection", "expiry", "is_leaving", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.connection: Connection | None = None
        self.expiry: asyncio.TimerHandle | None = None
        self.is_leaving = False


class _Asked:
    """One request while it runs, then its result; the request itself is not kept. `number` is the client's name for the
    answer."""

    __slots__ = ("due_s", "generation", "guest", "key", "number", "seed", "task")

    def __init__(self, ask: Ask, guest: Guest, due_s: float) -> None:
        self.key = ask.key
        self.seed = ask.seed
        self.guest = guest
        self.number = ask.number
        self.due_s = due_s
        self.task: asyncio.Task[None] | None = None
        self.generation: Generation | None = None


class Desk:
    """See the module.

    Args:
        engine: what answers.
        replica: its name, for messages.
        grace_s: how long a client that is gone may come back for what it asked.
    """

    def __init__(self, engine: TokenGenerator, replica: str, grace_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._engine = engine
        self._replica = replica
        self._grace_s = grace_s
        self._asked: dict[str, _Asked] = {}
        self._sessions: dict[str, Guest] = {}
        self._guests: dict[str, Guest] = {}
        self._releasing: set[asyncio.Task[None]] = set()
        self._deadlines = DeadlineTimer(self._loop, self._sweep)
        self._full_from_s = math.inf
        self._is_leaving = False
        self._closed = False

    @property
    def running(self) -> int:
        """Requests that have no result yet."""
        return sum(asked.generation is None for asked in self._asked.values())

    @property
    def kept(self) -> int:
        """Results that nobody has acknowledged yet."""
        return len(self._asked) - self.running

    @property
    def sessions(self) -> int:
        """Sessions that have asked for something and were not released."""
        return len(self._sessions)

    # --- clients ------------------------------------------------------------------------------------------------------

    def arrive(self, name: str, connection: Connection) -> Guest:
        """A client has proved itself on `connection`; one that was here before goes on where it was."""
        guest = self._guests.get(name)
        if guest is None:
            guest = Guest(name)
            if name:
                self._guests[name] = guest
        if guest.expiry is not None:
            guest.expiry.cancel()
            guest.expiry = None
        before, guest.connection = guest.connection, connection
        if before is not None:
            before.abort()
        return guest

    def leave(self, guest: Guest, connection: Connection) -> None:
        """That connection of a client is gone; the client may come back, unless it said farewell."""
        if guest.connection is not connection:
            return
        guest.connection = None
        if guest.is_leaving or not guest.name or self._closed:
            self._expire(guest)
        else:
            guest.expiry = self._loop.call_later(self._grace_s, self._expire, guest)

    def _expire(self, guest: Guest) -> None:
        self._guests.pop(guest.name, None)
        for key in [key for key, asked in self._asked.items() if asked.guest is guest]:
            self.cancel(key)
        for session in [session for session, owner in self._sessions.items() if owner is guest]:
            self.release(session)

    # --- requests -----------------------------------------------------------------------------------------------------

    def ask(self, guest: Guest, ask: Ask, received_s: float) -> None:
        """Run a request, or answer one that was asked before (P24)."""
        due_s = received_s + ask.deadline_s
        asked = self._asked.get(ask.key)
        if asked is not None:
            self._ask_again(asked, guest, ask, due_s)
            return
        session = ask.session
        if received_s >= self._full_from_s and session not in self._sessions:
            error: EngineError = VersionUnavailable(f"replica {self._replica} drains and takes no new session")
            _send(guest, encode(failure_of(ask.number, error)))
            return
        if len(self._asked) >= MAX_REQUESTS:
            error = EngineError(f"more than {MAX_REQUESTS} open requests at one door")
            _send(guest, encode(failure_of(ask.number, error)))
            return
        self._sessions[session] = guest
        asked = self._asked[ask.key] = _Asked(ask, guest, due_s)
        if due_s < self._deadlines.next_s:
            self._deadlines.arm(due_s)
        asked.task = asyncio.Task(self._run(asked, request_of(ask)), loop=self._loop, name="door")

    def _ask_again(self, asked: _Asked, guest: Guest, ask: Ask, due_s: float) -> None:
        if asked.seed != ask.seed:
            error = EngineError(f"the key {ask.key} is that of another request")
            _send(guest, encode(failure_of(ask.number, error)))
            return
        if asked.generation is None and (asked.guest is not guest or asked.number != ask.number):
            error = EngineError(f"the request {ask.key} was asked for again, and is answered there")
            _send(asked.guest, encode(failure_of(asked.number, error)))
        asked.guest, asked.number, asked.due_s = guest, ask.number, due_s
        self._sessions[ask.session] = guest
        self._deadlines.arm(due_s)
        if asked.generation is not None:
            self._answer(asked, encode_generation(ask.number, asked.generation))

    async def _run(self, asked: _Asked, request: GenerationRequest) -> None:
        key = asked.key
        try:
            generation = await self._engine.generate(request)
            body = encode_generation(asked.number, generation)
        except asyncio.CancelledError:
            if self._asked.get(key) is not asked:
                raise
            self._fail(asked, EngineError("the engine cancelled the request"))
        except Exception as error:  # the engine boundary: whatever it raises crosses as a typed failure
            if not isinstance(error, EngineError | DeadlineExceeded):
                _log.exception("door %s: request %s failed", self._replica, key)
            self._fail(asked, error)
        else:
            if self._asked.get(key) is asked:
                asked.generation, asked.task = generation, None
                self._answer(asked, body)

    def _answer(self, asked: _Asked, body: bytes) -> None:
        try:
            _send(asked.guest, body)
        except FrameError as error:
            self._fail(asked, error)

    def _fail(self, asked: _Asked, error: Exception) -> None:
        """Nothing was sampled that could be kept: who asks again, asks anew."""
        if self._asked.get(asked.key) is asked:
            del self._asked[asked.key]
            _send(asked.guest, encode(failure_of(asked.number, error)))

    def cancel(self, key: str) -> None:
        """Nobody waits for this request any more. Safe for an unknown one."""
        asked = self._asked.pop(key, None)
        if asked is not None and asked.task is not None:
            asked.task.cancel()

    def acknowledge(self, keys: Sequence[str]) -> None:
        """These results have arrived (P24)."""
        for key in keys:
            self._asked.pop(key, None)

    def release(self, session: str) -> None:
        """The session samples no further (P19)."""
        self._sessions.pop(session, None)
        task = self._loop.create_task(self._release(session))
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)

    async def _release(self, session: str) -> None:
        try:
            await self._engine.release(session)
        except Exception:  # the engine boundary: a session that cannot be released is the engine's loss only
            _log.exception("door %s: release of %s failed", self._replica, session)

    def _sweep(self, now_s: float) -> float:
        """End what is late, and forget results that nobody can wait for any more."""
        for key in [key for key, asked in self._asked.items() if asked.due_s <= now_s]:
            asked = self._asked.pop(key)
            if asked.task is not None:
                asked.task.cancel()
                error = DeadlineExceeded("the generation did not end within its deadline")
                _send(asked.guest, encode(failure_of(asked.number, error)))
        return min((asked.due_s for asked in self._asked.values()), default=math.inf)

    # --- draining and the end -----------------------------------------------------------------------------------------

    @property
    def is_draining(self) -> bool:
        """Whether the clients are told to take new sessions elsewhere."""
        return self._full_from_s < math.inf

    def drain(self, grace_s: float, for_good: bool) -> None:
        """Take no new session, but for `grace_s` those that were on their way."""
        self._full_from_s = self._loop.time() + grace_s
        self._is_leaving |= for_good

    def reopen(self) -> None:
        """Take new sessions again, unless the door drains for good."""
        if not self._is_leaving:
            self._full_from_s = math.inf

    def close(self) -> None:
        """Cancel everything."""
        self._closed = True
        self._deadlines.stop()
        for guest in self._guests.values():
            if guest.expiry is not None:
                guest.expiry.cancel()
        tasks = [asked.task for asked in self._asked.values() if asked.task is not None]
        self._asked.clear()
        for task in (*tasks, *self._releasing):
            task.cancel()


def _send(guest: Guest, message: bytes) -> None:
    connection = guest.connection
    if connection is not None:
        connection.send(message)
