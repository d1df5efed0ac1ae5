"""The learner in a Ray actor."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import ray

from headrace.trainer.learner import Learner
from headrace.trainer.report import StepReport


class _LearnerActor:
    """The shell around `Learner`."""

    async def start(
        self, build: Callable[[], Awaitable[tuple[Learner, Callable[[], Awaitable[None]]]]], takeover: bool = False
    ) -> int:
        """Build the learner and take the run over; returns the head. See `Learner.start`."""
        self._learner, self._closing = await build()
        return await self._learner.start(takeover=takeover)

    async def steps(self) -> int:
        """See `Learner.steps`."""
        return self._learner.steps

    async def step(self) -> StepReport:
        """See `Learner.step`."""
        return await self._learner.step()

    async def keep(self, versions: Sequence[int]) -> None:
        """See `Learner.keep`."""
        self._learner.keep(versions)

    async def close(self) -> None:
        """Give leases back and release connections."""
        await self._learner.close()
        await self._closing()


LearnerActor: Any = ray.remote(_LearnerActor)
