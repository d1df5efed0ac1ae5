"""A rollout worker in a Ray actor. Ray carries control only; tokens and episodes travel by their own ways."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import ray

from headrace.actors.outcomes import EpisodeOutcome, WorkerStats
from headrace.actors.worker import RolloutWorker


class _RolloutActor:
    """The shell around `RolloutWorker`."""

    async def build(self, build: Callable[[], Awaitable[tuple[RolloutWorker, Callable[[], Awaitable[None]]]]]) -> None:
        """Build the worker; it plays nothing yet."""
        self._worker, self._closing = await build()

    async def start(self) -> None:
        """See `RolloutWorker.start`."""
        await self._worker.start()

    async def stop(self) -> None:
        """See `RolloutWorker.stop`."""
        await self._worker.stop()

    async def evaluate(self, version: int, split: str, positions: Sequence[int], index: int) -> list[EpisodeOutcome]:
        """See `RolloutWorker.evaluate`."""
        return await self._worker.evaluate(version, split, positions, index)

    async def stats(self) -> WorkerStats:
        """See `RolloutWorker.stats`."""
        return self._worker.stats()

    async def tool_intervals(self, since_s: float) -> list[tuple[float, float]]:
        """See `RolloutWorker.tool_intervals`."""
        return self._worker.tool_intervals(since_s)

    async def close(self) -> None:
        """End scorers, release connections."""
        await self._worker.close()
        await self._closing()


RolloutActor: Any = ray.remote(_RolloutActor)
