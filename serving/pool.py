"""The inference pool as an episode sees it: several replicas behind one TokenGenerator.

Owns which replica a request goes to: the one that has the session's cached keys and values, as long as it holds the
request's version; else the one with the fewest requests in flight among those that do. Replicas come and go while
requests run. It neither retries (P24) nor loads versions: it knows what its replicas announce.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from headrace.platform.contracts import TokenGenerator
from headrace.platform.errors import DeadlineExceeded, EngineDead, VersionUnavailable
from headrace.platform.records.generation import Generation, GenerationRequest


class PoolMember(TokenGenerator, Protocol):
    """What the pool needs of a client. It takes over both callbacks; DoorClient is one."""

    replica: str
    on_versions: Callable[[], None] | None
    on_closed: Callable[[], None] | None
    closed: asyncio.Event

    async def close(self) -> None:
        """Part from the replica."""


class _Replica:
    """A member with what the pool counts about it."""

    __slots__ = ("client", "in_flight", "sessions", "versions")

    def __init__(self, client: PoolMember) -> None:
        self.client = client
        self.versions = frozenset(client.versions())
        self.in_flight = 0
        self.sessions = 0


class Pool:
    """A TokenGenerator over replicas. Everything happens on one event loop."""

    def __init__(self) -> None:
        self._replicas: dict[str, _Replica] = {}
        self._home: dict[str, _Replica] = {}
        self._changed = asyncio.Event()

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
            The client of the old one, for the caller to close, or None where the pool had noticed its end.

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
        client.on_versions = client.on_closed = None
        if replica.sessions:
            self._home = {session: home for session, home in self._home.items() if home is not replica}
        self._wake()

    def _announced(self, replica: _Replica) -> None:
        replica.versions = frozenset(replica.client.versions())
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # --- TokenGenerator -----------------------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> Generation:
        """See TokenGenerator. Raises VersionUnavailable when no replica holds the version (P23)."""
        replica = self._route(request)
        replica.in_flight += 1
        try:
            return await replica.client.generate(request)
        except EngineDead:
            self._leave(replica)
            raise
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

    def _route(self, request: GenerationRequest) -> _Replica:
        home = self._home.get(request.session)
        if home is not None and request.version in home.versions:
            return home
        holders = [replica for replica in self._replicas.values() if request.version in replica.versions]
        if not holders:
            raise VersionUnavailable(
                f"none of {len(self._replicas)} replicas holds version {request.version}; held: {list(self.versions())}"
            )
        replica = min(holders, key=lambda holder: (holder.in_flight, holder.sessions))
        if home is not None:
            home.sessions -= 1
        replica.sessions += 1
        self._home[request.session] = replica
        return replica

    # --- versions -----------------------------------------------------------------------------------------------------

    def newest_version(self) -> int | None:
        """The newest version that at least one replica holds, for new episodes to pin (P22)."""
        return max((max(replica.versions) for replica in self._replicas.values() if replica.versions), default=None)

    async def wait_version(self, at_least: int, timeout_s: float) -> int:
        """Wait until a replica holds `at_least` or newer; returns the newest. Raises DeadlineExceeded."""
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
