"""Which version a request runs under, and who waits for whom while versions change (P22). Pure bookkeeping.

::

    enter ─► under the version asked for, or the newest that will do ─► leave
      │            ▲
      └► held back ┘ while a version is coming that will do for it

    giving_up(old) ─► no new requests for it ─► until_only_inflight(old) ─► the weights change ─► replace

Everything is called on one event loop. Waiting requests are woken by whatever changes the versions; whoever waits for a
version to run empty is woken by the request that leaves last. `fail` wakes everybody for good.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from headrace.platform.errors import EngineDead, EngineError, VersionUnavailable
from headrace.platform.records.generation import Generation, GenerationRequest
from headrace.platform.records.status import UpdateMode
from headrace.platform.records.versions import VersionManifest, VersionRef


@dataclass(kw_only=True, slots=True, eq=False)
class Ticket:
    """A request that waits or runs, and what its caller waits for. `name` is what vLLM calls it, while it runs."""

    request: GenerationRequest
    future: asyncio.Future[Generation]
    name: str = ""


@dataclass(kw_only=True, slots=True, eq=False)
class Held:
    """A version that the engine holds. `adapter` is vLLM's LoRARequest; none for full weights."""

    manifest: VersionManifest
    path: str
    adapter: Any = None
    running: set[Ticket] = field(default_factory=set)
    leaving: bool = False

    @property
    def ref(self) -> VersionRef:
        """Its name."""
        return self.manifest.ref


class Versions:
    """The versions of one engine and the requests that run on each.

    Args:
        replica: for messages.
        session_ttl_s: a session not heard of for so long counts as gone.
    """

    def __init__(self, replica: str, session_ttl_s: float) -> None:
        self._replica = replica
        self._held: dict[int, Held] = {}
        self._coming: int | None = None
        self._sessions: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._session_ttl_s = session_ttl_s
        self._changed = asyncio.Event()
        self._dead = ""

    # --- what is held -------------------------------------------------------------------------------------------------

    def numbers(self) -> list[int]:
        """Versions that can be asked for, oldest first."""
        return sorted(number for number, held in self._held.items() if not held.leaving)

    def get(self, number: int) -> Held | None:
        """A version, also one on its way out."""
        return self._held.get(number)

    def oldest(self) -> Held | None:
        """The version that gives way when there is no room."""
        return self._held[min(self._held)] if self._held else None

    def __len__(self) -> int:
        return len(self._held)

    def holds(self, manifest: VersionManifest) -> bool:
        """Whether this very version can be asked for. Raises EngineError where it has other content or is leaving."""
        held = self._held.get(manifest.ref.number)
        if held is None:
            return False
        if held.leaving or held.manifest.content_hash != manifest.content_hash:
            raise EngineError(f"{manifest.ref} is held already, with other content or on its way out")
        return True

    def add(self, held: Held) -> None:
        """A version can be asked for."""
        self._held[held.ref.number] = held
        self._wake()

    def drop(self, held: Held) -> None:
        """A version is gone."""
        self._held.pop(held.ref.number, None)
        self._wake()

    def replace(self, old: Held, new: Held) -> None:
        """New weights are in the place of `old`'s; what runs there runs under `new` now."""
        new.running, old.running = old.running, set()
        for ticket in new.running:
            session = ticket.request.session
            if session in self._sessions:
                self._sessions[session] = (new.ref.number, self._sessions[session][1])
        del self._held[old.ref.number]
        self.add(new)

    # --- changes ------------------------------------------------------------------------------------------------------

    @contextmanager
    def coming(self, number: int) -> Iterator[None]:
        """While version `number` is on its way, requests that it will do for, and no other, are held back."""
        self._coming = number
        try:
            yield
        finally:
            self._coming = None
            self._wake()

    @contextmanager
    def giving_up(self, held: Held) -> Iterator[None]:
        """No new requests for a version, for good unless the block fails."""
        before, held.leaving = held.leaving, True
        self._wake()
        try:
            yield
        except BaseException:
            held.leaving = before
            self._wake()
            raise

    async def until_only_inflight(self, held: Held) -> None:
        """Wait until only requests that may change their weights run on a version. Raises EngineDead."""
        while any(ticket.request.update_mode is not UpdateMode.INFLIGHT for ticket in held.running):
            await self._change()

    async def until_empty(self, held: Held) -> None:
        """Wait until nothing runs on a version. Raises EngineDead."""
        while held.running:
            await self._change()

    def fail(self, reason: str) -> None:
        """The engine is dead: everyone who waits here gets EngineDead."""
        self._dead = reason
        self._wake()

    # --- requests -----------------------------------------------------------------------------------------------------

    async def enter(self, ticket: Ticket, now_s: float) -> Held:
        """The version to run a request under, which it counts for until `leave`.

        Args:
            ticket: the request.
            now_s: monotonic; when its session was heard of.

        Raises:
            VersionUnavailable: neither held nor, where a newer one will do, on its way.
            EngineDead: the engine is gone.
        """
        while (held := self._choose(ticket.request)) is None:
            await self._change()
        held.running.add(ticket)
        session = ticket.request.session
        self._sessions[session] = (held.ref.number, now_s)
        self._sessions.move_to_end(session)
        return held

    def leave(self, ticket: Ticket) -> None:
        """A request runs no longer."""
        for held in self._held.values():
            if ticket in held.running:
                held.running.remove(ticket)
                self._wake()

    def movable(self, to: int) -> list[Ticket]:
        """Requests of mode INFLIGHT that run on older versions than `to`."""
        return [
            ticket
            for number, held in self._held.items()
            if number < to
            for ticket in held.running
            if ticket.request.update_mode is UpdateMode.INFLIGHT
        ]

    def release(self, session: str) -> None:
        """The session is over (P19)."""
        self._sessions.pop(session, None)

    def sessions(self, number: int, now_s: float) -> int:
        """Sessions last served under version `number`, not released, and heard of within their time to live."""
        while self._sessions:
            session, (_, heard_s) = next(iter(self._sessions.items()))
            if now_s - heard_s < self._session_ttl_s:
                break
            self.release(session)
        return sum(served == number for served, _ in self._sessions.values())

    def _choose(self, request: GenerationRequest) -> Held | None:
        """None: it is held back. P22: exactly the pinned version, or the newest that is no older."""
        if self._dead:
            raise EngineDead(self._dead)
        numbers = self.numbers()
        if request.update_mode is UpdateMode.STICKY:
            if request.version in numbers:
                return self._held[request.version]
        elif numbers and numbers[-1] >= request.version:
            return self._held[numbers[-1]]
        elif self._coming is not None and self._coming >= request.version:
            return None
        raise VersionUnavailable(f"engine {self._replica} does not hold version {request.version}: {numbers}")

    async def _change(self) -> None:
        await self._changed.wait()
        if self._dead:
            raise EngineDead(self._dead)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
