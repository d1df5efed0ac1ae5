"""One replica as a service: an engine that follows the registry, behind a token door. Without Ray.

A replica that is started again knows nothing of the one before: it holds no version, and so gets no request, until it
has loaded a committed one (case S6). One whose engine dies is over: the door closes at once, so that every client knows
(case S5), and whoever asks the service anything hears that the part is dead, and starts another.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec

from headrace.platform.contracts import VersionRegistry
from headrace.platform.errors import EngineDead, PartDied
from headrace.platform.observability.parts import Part
from headrace.platform.records.status import UpdateMode
from headrace.serving.door.server import DoorServer
from headrace.serving.engine import ServedEngine
from headrace.serving.replica import Replica

_log = logging.getLogger(__name__)


class ReplicaStats(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's counters since its start, and what it holds now.

    `capacity` is how many versions it can hold, `held` what an evaluation holds it to, `newest` the newest committed
    version that it knows of. One that is told to roll drains, whether or not its door has been told. `rolled_s` are the
    seconds in which it was between two versions, and could sample nothing.
    """

    replica: str
    versions: tuple[int, ...]
    sampled_tokens: int
    prefilled_tokens: int
    reused_tokens: int
    running: int
    load_failures: int
    capacity: int = 1 << 30
    sessions: int = 0
    is_draining: bool = False
    held: tuple[int, ...] = ()
    newest: int = -1
    rolled_s: float = 0.0


class ReplicaService:
    """See the module. `closing` releases what the builder opened for it, such as ledger connections; `part` says what
    the replica holds, or waits for. The other arguments are those of `Replica`."""

    def __init__(
        self,
        engine: ServedEngine,
        name: str,
        door: DoorServer,
        registry: VersionRegistry,
        keep_versions: int,
        closing: Callable[[], Awaitable[None]],
        part: Part | None = None,
        *,
        update_mode: UpdateMode = UpdateMode.STICKY,
        control_deadline_s: float = 120.0,
        drain_grace_s: float = 1.0,
    ) -> None:
        self._engine = engine
        self._name = name
        self._door = door
        self._replica = Replica(
            engine,
            name,
            control_deadline_s=control_deadline_s,
            update_mode=update_mode,
            gate=door,
            drain_grace_s=drain_grace_s,
        )
        self._drain_grace_s = drain_grace_s
        self._registry = registry
        self._keep_versions = keep_versions
        self._closing = closing
        self._part = part
        self._following: asyncio.Task[None] | None = None
        self._dying: asyncio.Task[None] | None = None
        self._why_dead = ""
        self._is_leaving = False

    async def start(self) -> tuple[str, int]:
        """Open the door and begin to follow; returns the address. Versions come as they are committed."""
        address = await self._door.start()
        self._say()
        self._following = asyncio.create_task(
            self._replica.follow(self._registry, self._keep_versions, self._versions_changed)
        )
        self._dying = asyncio.create_task(self._watch_engine())
        return address

    async def _watch_engine(self) -> None:
        self._why_dead = await self._engine.wait_dead() or "it said no more"
        _log.error("replica %s: the engine is dead: %s", self._name, self._why_dead)
        if self._part is not None:
            self._part.set("dead", "")
        if self._following is not None:
            self._following.cancel()
        await self._door.close(f"its engine is dead: {self._why_dead}")

    def stats(self) -> ReplicaStats:
        """Counters.

        Raises:
            PartDied: the engine is dead.
            Exception: whatever else ended the follow loop.
        """
        self._check_alive()
        stats = self._engine.stats()
        return ReplicaStats(
            replica=self._name,
            versions=tuple(self._engine.versions()),
            sampled_tokens=stats.sampled_tokens,
            prefilled_tokens=stats.prefilled_tokens,
            reused_tokens=stats.reused_tokens,
            running=stats.running,
            load_failures=self._replica.failures,
            capacity=self._engine.capacity,
            sessions=self._door.sessions,
            is_draining=self._door.is_draining or self._replica.is_rolling,
            held=tuple(sorted(self._replica.held)),
            newest=self._replica.newest,
            rolled_s=self._replica.rolled_s,
        )

    def _check_alive(self) -> None:
        if self._why_dead:
            raise PartDied(f"the engine is dead: {self._why_dead}")
        following = self._following
        if following is not None and following.done() and not following.cancelled():
            error = following.exception()
            if isinstance(error, EngineDead):
                raise PartDied(f"the engine is dead: {error}") from error
            if error is not None:
                raise error

    def hold(self, version: int) -> None:
        """Keep `version` loaded until `let_go`, and load it if it is not; a replica with room for one version loads it
        only when it is told to roll."""
        self._replica.held.add(version)

    def let_go(self, version: int) -> None:
        """`version` may go when it is old."""
        self._replica.held.discard(version)

    def roll(self, version: int, hold: bool, drain_deadline_s: float) -> None:
        """See `Replica.roll`. A replica that leaves does not hear it."""
        if not self._is_leaving:
            self._replica.roll(version, hold=hold, drain_deadline_s=drain_deadline_s)

    def leave(self) -> None:
        """Drain for good: the sessions that are here go on, and no new one comes. `stats` says how many are left."""
        self._is_leaving = True
        self._door.drain(self._drain_grace_s, for_good=True)

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
        tasks = [task for task in (self._following, self._dying) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._door.close()
        await self._engine.close()
        await self._closing()
