"""The inference pool as an episode sees it: several replicas behind one TokenGenerator.

Owns which replica a request goes to: the one that has the session's cached keys and values, as long as it can serve the
request; else the one with the fewest requests in flight among those that can. A sticky request needs its very version,
the others any that is at least as new (P22). A session that is new to a replica avoids those that drain. Replicas come
and go while requests run: a turn whose replica is gone is sampled again, whole, at another one (P24, case S5); a lost
connection is the client's business (door/client.py). It loads no versions: it knows what its replicas announce.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import msgspec

from headrace.platform.contracts import Clock, TokenGenerator
from headrace.platform.errors import DeadlineExceeded, EngineDead, VersionUnavailable
from headrace.platform.records.generation import Generation, GenerationRequest
from headrace.platform.records.status import UpdateMode

_STICKY = UpdateMode.STICKY


class PoolMember(TokenGenerator, Protocol):
    """What the pool needs of a client. It takes over both callbacks; DoorClient is one."""

    replica: str
    is_draining: bool
    retried: int
    on_versions: Callable[[], None] | None
    on_closed: Callable[[], None] | None
    closed: asyncio.Event

    @property
    def is_connected(self) -> bool:
        """False while a lost connection is tried again."""

    async def close(self) -> None:
        """Part from the replica."""


class MemberStats(msgspec.Struct, frozen=True, kw_only=True):
    """One replica as the pool knows it: what it announced, and what this pool has there."""

    replica: str
    versions: tuple[int, ...]
    in_flight: int
    sessions: int
    is_draining: bool
    is_connected: bool


class PoolStats(msgspec.Struct, frozen=True, kw_only=True):
    """Load and health now. `retried`: requests sent again under their key over a new connection, which costs nothing;
    `resampled`: turns sampled again as their replica was gone, so that what it had sampled of them was lost (P24)."""

    members: tuple[MemberStats, ...]
    retried: int
    resampled: int


class _Replica:
    """A member with what the pool counts about it."""

    __slots__ = ("client", "in_flight", "is_away", "is_draining", "newest", "sessions", "versions")

    def __init__(self, client: PoolMember) -> None:
        self.client = client
        self.in_flight = 0
        self.sessions = 0
        self.hear()

    def hear(self) -> None:
        """Take up what the client knows now."""
        self.versions = frozenset(self.client.versions())
        self.newest = max(self.versions, default=-1)
        self.is_draining = self.client.is_draining
        self.is_away = not self.client.is_connected

    def serves(self, request: GenerationRequest) -> bool:
        """Whether it holds what the request needs (P22)."""
        if request.update_mode is _STICKY:
            return request.version in self.versions
        return request.version <= self.newest


class Pool:
    """A TokenGenerator over replicas. Everything happens on one event loop. `clock` is monotonic."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._replicas: dict[str, _Replica] = {}
        self._home: dict[str, _Replica] = {}
        self._changed = asyncio.Event()
        self._retried_by_former = 0
        self._resampled = 0

    # --- members ------------------------------------------------------------------------------------------------------

    def add(self, client: PoolMember) -> None:
        """Take up a connected replica.

        Raises:
            ValueError: a replica of this name is already in the pool.
            EngineDead: the connection is already gone.
        """
        self._check(client)
        replica = self._replicas[client.replica] = _Replica(client)
        client.on_versions = lambda: self._announced(replica)
        client.on_closed = lambda: self._leave(replica)
        self._wake()

    def remove(self, name: str) -> PoolMember:
        """Send nothing more to a replica; returns its client, whose requests go on. Raises KeyError."""
        replica = self._replicas[name]
        self._leave(replica)
        return replica.client

    def replace(self, name: str, client: PoolMember) -> PoolMember | None:
        """Ask `client` from now on instead of the replica `name`, which was started anew, perhaps under the same name.

        Returns:
            The client of the old one, for the caller to close, or None where the pool had noticed its end, or there
            was none: then a replica has joined.

        Raises:
            ValueError, EngineDead: as `add`; the pool is as it was then.
        """
        self._check(client, instead_of=name)
        old = self._replicas.get(name)
        if old is not None:
            self._leave(old)
        self.add(client)
        return old.client if old is not None else None

    async def close(self) -> None:
        """Close every client."""
        replicas = list(self._replicas.values())
        for replica in replicas:
            self._leave(replica)
        await asyncio.gather(*(replica.client.close() for replica in replicas))

    @property
    def in_flight(self) -> dict[str, int]:
        """Requests in flight by replica."""
        return {name: replica.in_flight for name, replica in self._replicas.items()}

    def stats(self) -> PoolStats:
        """Load and health of the members, and what was asked for more than once."""
        members = tuple(
            MemberStats(
                replica=name,
                versions=tuple(sorted(replica.versions)),
                in_flight=replica.in_flight,
                sessions=replica.sessions,
                is_draining=replica.is_draining,
                is_connected=not replica.is_away,
            )
            for name, replica in self._replicas.items()
        )
        retried = self._retried_by_former + sum(replica.client.retried for replica in self._replicas.values())
        return PoolStats(members=members, retried=retried, resampled=self._resampled)

    def _check(self, client: PoolMember, instead_of: str = "") -> None:
        if client.replica in self._replicas and client.replica != instead_of:
            raise ValueError(f"replica {client.replica} is already in the pool")
        if client.closed.is_set():
            raise EngineDead(f"replica {client.replica} is gone")

    def _leave(self, replica: _Replica) -> None:
        client = replica.client
        if self._replicas.get(client.replica) is not replica:
            return
        del self._replicas[client.replica]
        self._retried_by_former += client.retried
        client.on_versions = client.on_closed = None
        if replica.sessions:
            self._home = {session: home for session, home in self._home.items() if home is not replica}
        self._wake()

    def _announced(self, replica: _Replica) -> None:
        replica.hear()
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # --- TokenGenerator -----------------------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> Generation:
        """See TokenGenerator. Raises VersionUnavailable when no replica can serve the request (P23)."""
        began_s = self._clock()
        replica = self._home.get(request.session)
        if replica is None or not replica.serves(request):
            replica = await self._place(request)
        replica.in_flight += 1
        try:
            return await replica.client.generate(request)
        except (EngineDead, VersionUnavailable) as error:
            failure = error
        finally:
            replica.in_flight -= 1
        return await self._elsewhere(request, replica, failure, began_s)

    async def _elsewhere(
        self, request: GenerationRequest, replica: _Replica, failure: EngineDead | VersionUnavailable, began_s: float
    ) -> Generation:
        """P24, case S5: the whole turn at another replica, within what is left of its deadline. One that is dead
        leaves; one that is out of reach, or does not serve the request (any more), is only not asked again."""
        tried: list[_Replica] = []
        while True:
            is_dead = isinstance(failure, EngineDead)
            tried.append(replica)
            if is_dead and (replica.client.closed.is_set() or replica.client.is_connected):
                self._leave(replica)
            left_s = request.deadline_s - (self._clock() - began_s)
            if left_s <= 0:
                raise failure
            try:
                replica = await self._place(request, without=tried)
            except VersionUnavailable:
                raise failure from None
            self._resampled += is_dead
            replica.in_flight += 1
            try:
                return await replica.client.generate(msgspec.structs.replace(request, deadline_s=left_s))
            except (EngineDead, VersionUnavailable) as error:
                failure = error
            finally:
                replica.in_flight -= 1

    async def release(self, session: str) -> None:
        """See TokenGenerator."""
        replica = self._home.pop(session, None)
        if replica is not None:
            replica.sessions -= 1
            await replica.client.release(session)

    def versions(self) -> Sequence[int]:
        """See TokenGenerator: what at least one replica holds."""
        return sorted(frozenset().union(*(replica.versions for replica in self._replicas.values())))

    async def _place(self, request: GenerationRequest, without: Collection[_Replica] = ()) -> _Replica:
        """A home for the session where the request can be served; the one that it had is told that it has left."""
        able = [each for each in self._replicas.values() if each.serves(request) and each not in without]
        if not able:
            raise VersionUnavailable(
                f"none of {len(self._replicas)} replicas holds version {request.version}; held: {list(self.versions())}"
            )
        replica = min(able, key=lambda each: (each.is_draining, each.is_away, each.in_flight, each.sessions))
        session = request.session
        home = self._home.get(session)
        if replica is home:
            return home
        replica.sessions += 1
        self._home[session] = replica
        if home is not None:
            home.sessions -= 1
            await home.client.release(session)
        return replica

    # --- versions -----------------------------------------------------------------------------------------------------

    def newest_version(self) -> int | None:
        """The newest version that new sessions can have, for new episodes to pin (P22): None while every replica is
        empty or drains, so that nothing is begun that would be refused."""
        newest = max((each.newest for each in self._replicas.values() if not each.is_draining), default=-1)
        return newest if newest >= 0 else None

    async def wait_version(self, at_least: int, timeout_s: float) -> int:
        """Wait until a replica offers `at_least` or newer; returns the newest. Raises DeadlineExceeded."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    newest = self.newest_version()
                    if newest is not None and newest >= at_least:
                        return newest
                    await self._changed.wait()
        except TimeoutError as error:
            held = list(self.versions())
            raise DeadlineExceeded(
                f"no replica held version {at_least} or newer within {timeout_s} s; held: {held}"
            ) from error
