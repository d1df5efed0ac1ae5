"""A client's connection to the gateway process, which is there again when it was lost.

Owns requests and their deadlines: each is answered, or ends as GatewayAway. After a connection was lost, what was not
answered is sent again on the next one, in the order in which it was asked, each session being opened before (P25). A
session's messages that want no answer are kept until an answer to that session shows that they have come.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.actors.gateway.framing import Wire
from headrace.actors.gateway.launch import Launch, connect
from headrace.actors.gateway.protocol import PROTOCOL, Answer, Close, Failed, Hello, Learn, Open, Recorded, Settle
from headrace.platform.errors import EnvironmentFault, GatewayAway, InDoubt, SafetyBlock
from headrace.platform.records.message import ToolCall

_decode = msgspec.msgpack.Decoder(Answer).decode
_MOST_HELD = 256 * 1024
_MOST_LEARNED = 64
_BETWEEN_TRIES_S = 0.02
_CONNECT_S = 60.0
_KINDS: dict[str, Callable[[str], Exception]] = {
    "conflict": ValueError,
    "in_doubt": InDoubt,
    "safety": SafetyBlock,
    "config": lambda told: EnvironmentFault(told, transient=False),
}


@dataclass(slots=True, eq=False)
class Opened:
    """What a session has to say on each new connection, before anything else.

    `unanswered` are messages that want no answer, each with the number of the request before it; `calls` how many were
    decided, `calls_of` how many of each tool were allowed, both with those of a record, of which `recorded` messages
    told. `began_s` is when the first was decided.
    """

    learn: Learn
    open: Open
    unanswered: list[tuple[int, Settle | Recorded]] = field(default_factory=list)
    calls: int = 0
    calls_of: dict[str, int] = field(default_factory=dict)
    recorded: int = 0
    began_s: float = 0.0

    def count(self, calls: Sequence[ToolCall], allowed: Sequence[ToolCall]) -> None:
        """Calls were decided."""
        self.calls += len(calls)
        for call in allowed:
            self.calls_of[call.name] = self.calls_of.get(call.name, 0) + 1

    def again(self) -> Open:
        """What opens it on a new connection. What may not have come, and comes again after it, is not counted in it."""
        coming = [message for _, message in self.unanswered if isinstance(message, Recorded)]
        calls_of = dict(self.calls_of)
        for message in coming:
            for call in message.calls:
                calls_of[call.name] -= 1
        return msgspec.structs.replace(
            self.open,
            calls=self.calls - sum([len(message.calls) for message in coming]),
            calls_of=calls_of,
            recorded=self.recorded - len(coming),
            began_s=self.began_s,
        )


@dataclass(slots=True, eq=False)
class _Asked:
    request: Any
    answer: "asyncio.Future[Any]"
    session: Opened | None
    deadline: float
    within_s: float


class _ClientWire(Wire):
    """Hands what comes to its link."""

    def __init__(self, link: "Link", loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(_decode, loop)
        self._link = link
        self.greeted: asyncio.Future[None] = loop.create_future()
        self.ended = asyncio.Event()

    def received(self, message: Answer) -> None:
        """See `Wire`."""
        if isinstance(message, Hello):
            if not self.greeted.done():
                self.greeted.set_result(None)
        else:
            self._link.answered(message)

    def slowed(self) -> None:
        """See `Wire`."""
        self._link.slowed(self.is_slow)

    def lost(self) -> None:
        """See `Wire`."""
        if not self.greeted.done():
            self.greeted.set_exception(ConnectionResetError(self.fault))
            self.greeted.exception()
        self._link.lost(self)


class Link:
    """The connection of one event loop.

    Args:
        launch: which process.
        hold_s: how long what wants no answer may wait for company.
    """

    def __init__(self, launch: Launch, hold_s: float) -> None:
        self._launch, self._hold_s = launch, hold_s
        self.loop = self._loop = asyncio.get_running_loop()
        self._wire: _ClientWire | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._numbers = itertools.count(1)
        self._last = 0
        self._asked: dict[int, _Asked] = {}
        self._learned: dict[str, None] = {}  # the oldest first
        self._opened: set[Opened] = set()
        self._leaves: asyncio.TimerHandle | None = None
        self._looks: asyncio.TimerHandle | None = None
        self._flows = asyncio.Event()
        self._flows.set()
        self._trouble = ""
        self._is_closed = False

    # --- for clients --------------------------------------------------------------------------------------------------

    async def ask(self, make: Callable[[int], Any], session: Opened | None, within_s: float) -> Any:
        """Send a request and wait for its answer.

        Args:
            make: from its number to the request.
            session: whose it is.
            within_s: the deadline.

        Raises:
            GatewayAway: there was no answer in time, or there never will be one.
            ValueError, InDoubt, SafetyBlock, EnvironmentFault: as the answer says.
            OverflowError, UnicodeEncodeError: the request cannot be sent; nothing of it was.
        """
        if self._is_closed:
            raise GatewayAway("the gateway's client is closed")
        if not self._flows.is_set():
            await self._flow(within_s)
        self._last = number = next(self._numbers)
        asked = _Asked(make(number), self._loop.create_future(), session, self._loop.time() + within_s, within_s)
        if self._wire is not None:
            self._send(self._wire, asked)
        else:
            self._connect()
        self._asked[number] = asked
        if self._looks is None:
            self._looks = self._loop.call_later(min(0.25, within_s / 4), self._look)
        return await asked.answer

    def tell(self, message: Settle | Recorded, session: Opened) -> None:
        """Send what wants no answer, with the next request of anybody, or soon."""
        session.unanswered.append((self._last, message))
        if self._wire is None or session not in self._opened:
            return  # it goes with what opens the session again
        self._wire.hold(message)
        if self._wire.held_bytes > _MOST_HELD:
            self._leave()
        elif self._leaves is None:
            self._leaves = self._loop.call_later(self._hold_s, self._leave)

    async def up(self, within_s: float) -> None:
        """Wait until there is a connection. Raises GatewayAway."""
        if self._wire is not None:
            return
        try:
            async with asyncio.timeout(within_s):
                await asyncio.shield(self._connect())
        except TimeoutError:
            raise GatewayAway(f"the gateway did not start within {within_s:g} s") from None
        if self._wire is None:
            raise GatewayAway(self._trouble or "the gateway went away")

    async def close(self) -> None:
        """Hang up. What was not answered never will be."""
        self._is_closed = True
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])
        for timer in (self._leaves, self._looks):
            if timer is not None:
                timer.cancel()
        if (wire := self._wire) is not None:
            wire.end()
            await wire.ended.wait()
        self._fail("the gateway's client was closed")

    # --- for the wire -------------------------------------------------------------------------------------------------

    def answered(self, answer: Any) -> None:
        """An answer has come."""
        asked = self._asked.pop(answer.seq, None)
        if asked is None:
            return
        session = asked.session
        if session is not None and (told := session.unanswered):  # what was told before has come, too
            session.unanswered = [each for each in told if each[0] >= answer.seq] if told[-1][0] >= answer.seq else []
        if session is not None and isinstance(asked.request, Close):  # or it failed, and has to be opened to try again
            self._opened.discard(session)
        if asked.answer.done():  # whoever asked has gone
            return
        if isinstance(answer, Failed):
            asked.answer.set_exception(_KINDS.get(answer.kind, GatewayAway)(answer.message))
        else:
            asked.answer.set_result(answer)

    def slowed(self, slow: bool) -> None:
        """The process does not read as fast as requests come, or does again."""
        if slow:
            self._flows.clear()
        else:
            self._flows.set()

    def lost(self, wire: _ClientWire) -> None:
        """A connection is gone."""
        wire.ended.set()
        self._flows.set()
        if wire is self._wire:
            self._wire = None
            if not self._is_closed and any(not asked.answer.done() for asked in self._asked.values()):
                self._connect()

    # --- sending ------------------------------------------------------------------------------------------------------

    def _send(self, wire: _ClientWire, asked: _Asked) -> None:
        session = asked.session
        if session is not None and session not in self._opened:
            if session.learn.digest not in self._learned:
                wire.hold(session.learn)
                if len(self._learned) >= _MOST_LEARNED:
                    del self._learned[next(iter(self._learned))]
                self._learned[session.learn.digest] = None
            wire.hold(session.again())
            self._opened.add(session)
            for _, told in session.unanswered:
                wire.hold(told)
        wire.send(asked.request)

    def _leave(self) -> None:
        if self._leaves is not None:
            self._leaves.cancel()
            self._leaves = None
        if self._wire is not None:
            self._wire.leave()

    async def _flow(self, within_s: float) -> None:
        try:
            async with asyncio.timeout(within_s):
                await self._flows.wait()
        except TimeoutError:
            raise GatewayAway(f"the gateway took no request for {within_s:g} s") from None

    # --- connections and deadlines ------------------------------------------------------------------------------------

    def _connect(self) -> "asyncio.Task[None]":
        if self._connecting is None:
            self._connecting = self._loop.create_task(self._reconnect())
        return self._connecting

    async def _reconnect(self) -> None:
        """Connect and greet, within a limit of its own; who waits for an answer has a deadline too."""
        self._trouble = ""
        try:
            async with asyncio.timeout(_CONNECT_S):
                while self._wire is None:
                    await self._try()
        except TimeoutError:
            self._fail(f"the gateway did not come up within {_CONNECT_S:g} s")
        except (OSError, GatewayAway) as error:
            self._fail(str(error))
        finally:
            self._connecting = None

    async def _try(self) -> None:
        wire = await connect(self._launch, lambda: _ClientWire(self, self._loop))
        try:
            wire.send(Hello(PROTOCOL, self._launch.home.token()))
            await wire.greeted
        except (ConnectionError, FileNotFoundError):  # it was about to end
            wire.abort("no greeting")
            await asyncio.sleep(_BETWEEN_TRIES_S)
        except BaseException:
            wire.abort("nobody waits")
            raise
        else:
            self._begin(wire)

    def _begin(self, wire: _ClientWire) -> None:
        """Say again, on a new connection, what was not answered."""
        self._wire = wire
        self._learned, self._opened = {}, set()
        for asked in list(self._asked.values()):
            if asked.answer.done():
                continue
            try:
                self._send(wire, asked)
            except (OverflowError, ValueError) as error:
                del self._asked[asked.request.seq]
                asked.answer.set_exception(error)

    def _look(self) -> None:
        """End what has waited for too long."""
        self._looks = None
        now, soonest = self._loop.time(), float("inf")
        for number, asked in list(self._asked.items()):
            if asked.answer.done():
                if self._wire is None or now >= asked.deadline:
                    del self._asked[number]
            elif now >= asked.deadline:
                del self._asked[number]
                asked.answer.set_exception(GatewayAway(f"the gateway did not answer within {asked.within_s:g} s"))
            else:
                soonest = min(soonest, asked.deadline)
        if self._asked:
            self._looks = self._loop.call_later(min(0.25, max(0.01, soonest - now)), self._look)

    def _fail(self, told: str) -> None:
        self._trouble = told
        asked, self._asked = self._asked, {}
        for each in asked.values():
            if not each.answer.done():
                each.answer.set_exception(GatewayAway(told))
