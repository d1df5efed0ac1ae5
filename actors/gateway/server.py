"""The gateway's side of the socket: connections, and what each message on them leads to.

Owns no decision: it finds the session that a message is for, hands it to the pipeline, and sends the answer when there
is one. Whatever is decided without waiting is answered without a task. Whoever is not this user, or does not show the
token first, is not listened to.
"""

import asyncio
import hmac
import logging
import os
import socket
import struct
import weakref
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from headrace import __version__
from headrace.actors.gateway.boxed import KINDS as BOXED_KINDS
from headrace.actors.gateway.decisions.capability import effective_grants
from headrace.actors.gateway.framing import Wire
from headrace.actors.gateway.journal import Journal
from headrace.actors.gateway.perform.performers import Performers
from headrace.actors.gateway.pipeline import Pipeline
from headrace.actors.gateway.policy import Mount
from headrace.actors.gateway.protocol import (
    PROTOCOL,
    Answer,
    Close,
    Closed,
    Decide,
    Failed,
    Hello,
    Learn,
    Mounted,
    Open,
    Recorded,
    Request,
    Results,
    Settle,
    Specs,
    Verdicts,
)
from headrace.actors.gateway.sessions import Learned, Session, Sessions, digest_of, merged
from headrace.platform.contracts import CallVerdict
from headrace.platform.errors import ConfigError, InDoubt, SafetyBlock
from headrace.platform.records.message import ToolSpec

_log = logging.getLogger(__name__)
_decode = msgspec.msgpack.Decoder(Request).decode
_PEER = struct.Struct("iII")
_MOST_LEARNED = 128
"""Of one connection; more than a `Link` takes the other side to know."""


class Server:
    """All connections of a process.

    Args:
        pipeline: decides.
        performers: make the tools that are performed here.
        journal: says which scopes an earlier process knew.
        token: what a client has to show.
        clock: monotonic seconds.
    """

    def __init__(
        self, pipeline: Pipeline, performers: Performers, journal: Journal, token: str, clock: Callable[[], float]
    ) -> None:
        self.pipeline, self._performers, self._journal, self.token = pipeline, performers, journal, token
        self._inherited = set(journal.scopes)
        self.sessions = Sessions(clock, self._forget)
        self.connections: set[Connection] = set()
        self._nobody = asyncio.Event()
        self._learned: weakref.WeakValueDictionary[str, Learned] = weakref.WeakValueDictionary()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._clock, self._idle_since_s, self.ever_served = clock, clock(), False

    @property
    def idle_s(self) -> float:
        """Seconds since the last connection went, 0 while there is one."""
        return 0.0 if self.connections else self._clock() - self._idle_since_s

    def connection(self) -> "Connection":
        """A new one, for asyncio."""
        return Connection(self, asyncio.get_running_loop())

    def start(self, doing: Awaitable[Any]) -> asyncio.Task[Any]:
        """Run something that is finished before the process ends."""
        task = asyncio.ensure_future(doing)
        self.follow(task)
        return task

    def follow(self, task: asyncio.Task[Any]) -> None:
        """Finish a task before the process ends."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def sweep(self) -> None:
        """What has to be done now and then: forget sessions whose time is over, and end what nobody waits for, such as
        questions to a person."""
        self.sessions.sweep()
        for session in self.sessions.unheard():
            self.pipeline.give_up(session)

    async def finish(self, timeout_s: float) -> None:
        """Let what runs come to its end and be answered, then close all connections."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)
            await asyncio.sleep(0)
        for connection in list(self.connections):
            connection.end("the gateway ends")
        if self.connections:
            self._nobody.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._nobody.wait()
            except TimeoutError:  # they do not read what they asked for
                for connection in list(self.connections):
                    connection.abort("it does not read")

    def gone(self, connection: "Connection") -> None:
        """A connection is over."""
        self.connections.discard(connection)
        if not self.connections:
            self._nobody.set()
        self._idle_since_s = self._clock()

    async def mounted(self, mounts: Sequence[Mount]) -> dict[str, ToolSpec]:
        """The tools of mounts, by name."""
        made = await self._performers.mount(tuple(mounts))
        return {name: spec for name, (_, spec) in made.items()}

    def learn(self, learn: Learn) -> Learned:
        """A policy with its tools; the same for all that say the same.

        Raises:
            ValueError: the digest is of something else.
        """
        learned = self._learned.get(learn.digest)
        if learned is not None:
            return learned
        if digest_of(learn.policy, learn.tools) != learn.digest:
            raise ValueError("a policy does not have the digest that it was sent under")
        learned = self._learned[learn.digest] = Learned(learn.policy, merged(learn.tools, {}))
        if any(mount.kind not in BOXED_KINDS for mount in learn.policy.mounts):
            learned.load, learned.ready = self._load, False
        return learned

    def open(self, request: Open, learned: Learned, caller: str) -> Session:
        """The session of a scope: the one that is known, else a new one.

        Raises:
            ConfigError: the task's grants are outside of what the recipe lets tasks grant.
            ValueError: the scope was opened under another policy.
        """
        session = self.sessions.find(request.scope)
        if session is not None:
            if session.learned is not learned:
                raise ValueError(f"{request.scope} was opened under another policy")
            return session
        session = Session(
            scope=request.scope,
            learned=learned,
            grants=effective_grants(learned.policy, request.grants),
            trusted=request.trusted,
            caller=caller,
            resumed=request.calls > 0 or request.scope in self._inherited,
            calls_before=request.calls,
            calls_of_before=dict(request.calls_of),
            began_before_s=request.began_s,
            recorded=request.recorded,
        )
        self.sessions.add(session)
        return session

    async def _load(self, learned: Learned) -> None:
        mounted = await self.mounted([mount for mount in learned.policy.mounts if mount.kind not in BOXED_KINDS])
        learned.specs, learned.mounted = merged(tuple(learned.specs.values()), mounted), frozenset(mounted)
        learned.ready = True

    def _forget(self, scope: str) -> None:
        self._inherited.discard(scope)
        self._journal.forget(scope)
        self.start(self._performers.end(scope))  # of one that nobody closed


class Connection(Wire):
    """One client."""

    def __init__(self, server: Server, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(_decode, loop)
        self._server = server
        self._is_known = False
        self._caller = ""
        self._learned: dict[str, Learned | ValueError] = {}
        self._sessions: dict[int, Session] = {}
        self._refused: dict[int, Failed] = {}
        self._ways: dict[type, Callable[[Any], None]] = {
            Hello: self._hello,
            Mounted: self._mounted,
            Learn: self._learn,
            Open: self._open,
            Recorded: self._recorded,
            Decide: self._decide,
            Settle: self._settle,
            Close: self._close,
        }

    def made(self, transport: asyncio.Transport) -> None:
        """See `Wire`. A process of another user gets no further."""
        peer: socket.socket = transport.get_extra_info("socket")
        pid, uid, _ = _PEER.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        if uid != os.getuid():
            self.abort(f"user {uid} may not speak here")
            return
        self._caller = f"pid {pid}"
        self._server.connections.add(self)
        self._server.ever_served = True

    def received(self, message: Request) -> None:
        """See `Wire`."""
        if not self._is_known and not isinstance(message, Hello):
            self.abort("the first message is no greeting")
            return
        self._ways[type(message)](message)

    def slowed(self) -> None:
        """See `Wire`: who does not read answers is not read from."""
        assert self._transport is not None
        if self.is_slow:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def lost(self) -> None:
        """See `Wire`. Its sessions go on, and wait for their clients."""
        for session in self._sessions.values():
            self._server.sessions.detach(session)
        self._sessions = {}
        self._server.gone(self)

    # --- messages -----------------------------------------------------------------------------------------------------

    def _hello(self, message: Hello) -> None:
        if not hmac.compare_digest(message.token.encode(), self._server.token.encode()):
            self.abort("wrong token")
        elif message.protocol != PROTOCOL:
            self.abort(f"protocol {message.protocol} is not {PROTOCOL}")
        else:
            self._is_known = True
            self.send(Hello(PROTOCOL, "", __version__))

    def _mounted(self, message: Mounted) -> None:
        task = self._server.start(self._server.mounted(message.mounts))
        task.add_done_callback(partial(self._later, message.seq, partial(_specs, message.seq)))

    def _learn(self, message: Learn) -> None:
        self._learned.pop(message.digest, None)
        try:
            self._learned[message.digest] = self._server.learn(message)
        except ValueError as error:
            self._learned[message.digest] = error
        if len(self._learned) > _MOST_LEARNED:
            del self._learned[next(iter(self._learned))]

    def _open(self, message: Open) -> None:
        try:
            learned = self._learned.get(message.digest, ValueError("its policy was not sent"))
            if isinstance(learned, ValueError):
                raise learned
            session = self._server.open(message, learned, self._caller)
        except ValueError as error:
            self._refused[message.session] = Failed(0, "config", str(error))
            return
        if message.session not in self._sessions:
            self._sessions[message.session] = session
            self._server.sessions.attach(session)

    def _recorded(self, message: Recorded) -> None:
        if (session := self._sessions.get(message.session)) is not None:
            try:
                self._server.pipeline.recorded(session, message.calls, message.number)
            except OSError as error:  # nothing is allowed after that either
                _log.error("calls from a record are not in the audit", exc_info=error)

    def _decide(self, message: Decide) -> None:
        session = self._sessions.get(message.session)
        if session is None:
            self._unknown(message.seq, message.session)
            return
        try:
            begun = self._server.pipeline.begin(session, message.calls, message.key, message.until_s)
        except Exception as error:
            self.send(_failure(message.seq, error))
            return
        if isinstance(begun, asyncio.Task):
            self._server.follow(begun)
            begun.add_done_callback(partial(self._later, message.seq, partial(_verdicts, message.seq)))
        else:
            self.send(Verdicts(message.seq, tuple(begun)))

    def _settle(self, message: Settle) -> None:
        session = self._sessions.get(message.session)
        if session is None:
            self._unknown(message.seq, message.session)
        elif session.learned.ready:
            self._settle_now(session, message)
        else:
            task = self._server.start(session.learned.loaded())
            task.add_done_callback(partial(self._settle_loaded, session, message))

    def _settle_loaded(self, session: Session, message: Settle, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._later(message.seq, Results, task)
        else:
            self._settle_now(session, message)

    def _settle_now(self, session: Session, message: Settle) -> None:
        try:
            task = self._server.pipeline.settle(session, message.outputs, message.key)
        except Exception as error:
            self.send(_failure(message.seq, error))
            return
        if task is not None:
            self._server.follow(task)
            task.add_done_callback(partial(self._later, message.seq, lambda _: Results(message.seq)))
        elif message.seq:
            self.send(Results(message.seq))

    def _close(self, message: Close) -> None:
        session = self._sessions.pop(message.session, None)
        if session is None:
            self._unknown(message.seq, message.session)
            self._refused.pop(message.session, None)
            return
        self._server.sessions.detach(session)
        task = self._server.pipeline.close(session)
        self._server.follow(task)
        task.add_done_callback(partial(self._later, message.seq, partial(Closed, message.seq)))

    def _unknown(self, seq: int, session: int) -> None:
        refused = self._refused.get(session, Failed(0, "away", f"no session {session} was opened"))
        self.send(Failed(seq, refused.kind, refused.message))

    def _later(self, seq: int, answer: Callable[[Any], Answer], task: asyncio.Task[Any]) -> None:
        """Answer with what a task came to."""
        if task.cancelled():
            self.send(Failed(seq, "away", "the gateway ends"))
        elif (error := task.exception()) is not None:
            self.send(_failure(seq, error))
        elif seq:
            self.send(answer(task.result()))


def _verdicts(seq: int, verdicts: Sequence[CallVerdict]) -> Verdicts:
    return Verdicts(seq, tuple(verdicts))


def _specs(seq: int, mounted: dict[str, ToolSpec]) -> Specs:
    return Specs(seq, tuple(mounted.values()))


def _failure(seq: int, error: BaseException) -> Failed:
    """What a client is told; whatever is not foreseen means that the call did not happen, or is in doubt."""
    if isinstance(error, ConfigError):
        return Failed(seq, "config", str(error))
    if isinstance(error, InDoubt):
        return Failed(seq, "in_doubt", str(error))
    if isinstance(error, SafetyBlock):
        return Failed(seq, "safety", str(error))
    if isinstance(error, ValueError):
        return Failed(seq, "conflict", str(error))
    _log.error("a request failed", exc_info=error)
    return Failed(seq, "away", f"{type(error).__name__}: {error}")
