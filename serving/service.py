"""One replica as a service: an engine that follows the registry, behind a token door. Without Ray.

A replica that is started again knows nothing of the one before: it holds no version, and so gets no request, until it
has loaded a committed one (case S6).
"""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from headrace.platform.contracts import VersionRegistry
from headrace.platform.observability.parts import Part
from headrace.serving.door.server import DoorServer
from headrace.serving.engine import ServedEngine
from headrace.serving.replica import Replica


class ReplicaStats(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's counters since its start, and what it holds now."""

    replica: str
    versions: tuple[int, ...]
    sampled_tokens: int
    prefilled_tokens: int
    reused_tokens: int
    running: int
    load_failures: int


class ReplicaService:
    """See the module. `closing` releases what the builder opened for it, such as ledger connections; `part` says what
    the replica holds, or waits for."""

    def __init__(
        self,
        engine: ServedEngine,
        name: str,
        door: DoorServer,
        registry: VersionRegistry,
        keep_versions: int,
        closing: Callable[[], Awaitable[None]],
        part: Part | None = None,
    ) -> None:
        self._engine = engine
        self._name = name
        self._door = door
        self._replica = Replica(engine, name)
        self._registry = registry
        self._keep_versions = keep_versions
        self._closing = closing
        self._part = part
        self._following: asyncio.Task[None] | None = None

    async def start(self) -> tuple[str, int]:
        """Open the door and begin to follow; returns the address. Versions come as they are committed."""
        address = await self._door.start()
        self._say()
        self._following = asyncio.create_task(
            self._replica.follow(self._registry, self._keep_versions, self._versions_changed)
        )
        return address

    def stats(self) -> ReplicaStats:
        """Counters.

        Raises:
            Exception: whatever ended the follow loop.
        """
        if self._following is not None and self._following.done() and (error := self._following.exception()):
            raise error
        stats = self._engine.stats()
        return ReplicaStats(
            replica=self._name,
            versions=tuple(self._engine.versions()),
            sampled_tokens=stats.sampled_tokens,
            prefilled_tokens=stats.prefilled_tokens,
            reused_tokens=stats.reused_tokens,
            running=stats.running,
            load_failures=self._replica.failures,
        )

    def hold(self, version: int) -> None:
        """Keep `version` loaded until `let_go`, and load it if it is not."""
        self._replica.held.add(version)

    def let_go(self, version: int) -> None:
        """`version` may go when it is old."""
        self._replica.held.discard(version)

    def busy_intervals(self, since_s: float) -> list[tuple[float, float]]:
        """When the engine computed, as (start, end) in seconds since the epoch."""
        return self._engine.busy_intervals(since_s)

    def _versions_changed(self) -> None:
        self._door.announce_versions()
        self._say()

    def _say(self) -> None:
        if self._part is not None:
            versions = ", ".join(map(str, self._engine.versions()))
            self._part.set(f"serving {versions}" if versions else "empty", "" if versions else "a committed version")

    async def close(self) -> None:
        """Stop following, close the door, end the engine."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        await self._door.close()
        await self._engine.close()
        await self._closing()
