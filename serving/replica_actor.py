"""A replica service in a Ray actor. Ray carries control only; tokens travel through the door."""

from collections.abc import Awaitable, Callable
from typing import Any

import ray

from headrace.serving.service import ReplicaService, ReplicaStats


class _ReplicaActor:
    """The shell around `ReplicaService`."""

    async def start(self, build: Callable[[], Awaitable[ReplicaService]]) -> tuple[str, int]:
        """Build and start the service; returns the door's address."""
        self._service = await build()
        return await self._service.start()

    async def stats(self) -> ReplicaStats:
        """See `ReplicaService.stats`."""
        return self._service.stats()

    async def hold(self, version: int) -> None:
        """See `ReplicaService.hold`."""
        self._service.hold(version)

    async def let_go(self, version: int) -> None:
        """See `ReplicaService.let_go`."""
        self._service.let_go(version)

    async def roll(self, version: int, hold: bool, drain_deadline_s: float) -> None:
        """See `ReplicaService.roll`."""
        self._service.roll(version, hold, drain_deadline_s)

    async def leave(self) -> None:
        """See `ReplicaService.leave`."""
        self._service.leave()

    async def busy_intervals(self, since_s: float) -> list[tuple[float, float]]:
        """See `ReplicaService.busy_intervals`."""
        return self._service.busy_intervals(since_s)

    async def close(self) -> None:
        """See `ReplicaService.close`."""
        await self._service.close()


ReplicaActor: Any = ray.remote(_ReplicaActor)
