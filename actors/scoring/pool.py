"""Several processes of one scorer, so that a slow reward holds up fewer episodes.

Owns who grades what: an episode goes to the idle process with the lowest number, so that no more are started than are
needed at once. Each process keeps its own deadline and is replaced by itself.
"""

import asyncio
from collections.abc import Sequence
from heapq import heappop, heappush

from headrace.actors.plan import AsyncScorer
from headrace.actors.scoring.process import ScorerProcess
from headrace.platform.config.environments import ScorerConfig
from headrace.platform.records.episode import Episode
from headrace.platform.records.message import RewardComponent, Task


class ScorerPool:
    """A `ScorerProcess` that grades several episodes at once.

    Args:
        processes: not started yet, all alike; at least one.
    """

    def __init__(self, processes: Sequence[ScorerProcess]) -> None:
        self._processes = list(processes)
        self._idle = list(range(len(self._processes)))
        self._free = asyncio.Semaphore(len(self._processes))
        self.version = self._processes[0].version

    @property
    def restarts(self) -> int:
        """How many processes were replaced."""
        return sum(process.restarts for process in self._processes)

    async def start(self) -> None:
        """Bring the first process up. Raises ConfigError as that of a `ScorerProcess`."""
        await self._processes[0].start()

    async def score(self, task: Task, episode: Episode) -> tuple[RewardComponent, ...]:
        """See `ScorerProcess.score`; waits while all processes grade."""
        async with self._free:
            index = heappop(self._idle)
            try:
                return await self._processes[index].score(task, episode)
            finally:
                heappush(self._idle, index)

    async def close(self) -> None:
        """End every process; safe to call twice. Scores in progress are ended with them."""
        await asyncio.gather(*(process.close() for process in self._processes))


def build_scorer_process(config: ScorerConfig) -> AsyncScorer:
    """What `config` asks for, in processes that start when they are needed."""
    processes = [ScorerProcess(config.kind, config.args, deadline_s=config.deadline_s) for _ in range(config.processes)]
    return processes[0] if len(processes) == 1 else ScorerPool(processes)
