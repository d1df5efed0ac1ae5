"""A rollout worker in a Ray actor. Ray carries control only; tokens and episodes travel by their own ways."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import ray

from headrace.actors.news import News
from headrace.actors.outcomes import WorkerStats
from headrace.actors.plan import PlayedEpisode
from headrace.actors.worker import RolloutWorker
from headrace.platform.records.evaluation import EpisodeOutcome


class _RolloutActor:
    """The shell around `RolloutWorker`."""

    async def build(self, build: Callable[[], Awaitable[tuple[RolloutWorker, Callable[[], Awaitable[None]]]]]) -> None:
        """Build the worker; it plays nothing yet."""
        self._worker, self._closing = await build()

    async def put_left(self) -> None:
        """See `RolloutWorker.put_left`."""
        await self._worker.put_left()

    async def start(self) -> None:
        """See `RolloutWorker.start`."""
        await self._worker.start()

    async def holder(self) -> str:
        """See `RolloutWorker`: the name of this process in the ledger."""
        return self._worker.holder

    async def replace_replica(self, old_name: str, host: str, port: int) -> None:
        """See `RolloutWorker.replace_replica`."""
        await self._worker.replace_replica(old_name, host, port)

    async def stop(self) -> None:
        """See `RolloutWorker.stop`."""
        await self._worker.stop()

    async def evaluate(
        self, version: int, split: str, positions: Sequence[int], index: int, samples: int = 1
    ) -> list[EpisodeOutcome]:
        """See `RolloutWorker.evaluate`."""
        return await self._worker.evaluate(version, split, positions, index, samples)

    async def news(self) -> News:
        """See `RolloutWorker.news`."""
        return self._worker.news()

    async def tell(self, news: News) -> None:
        """See `RolloutWorker.tell`."""
        self._worker.tell(news)

    async def recent(self, n: int) -> list[PlayedEpisode]:
        """See `RolloutWorker.recent`."""
        return self._worker.recent(n)

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
