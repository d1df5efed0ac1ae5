"""Foreign environments as an episode wants them: everything async, and every answer checked where it was given.

A plain method runs in a thread, so that one that blocks holds up its own session only (case E11); `tools` does, too,
and is asked once, by the reset. Calls of one session never overlap: the episode awaits each, and what it stopped
waiting for keeps the next one waiting. Where the session is built is `late.py`'s.
"""

import inspect
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, cast

from headrace.actors.environments.answers import checked_observation, checked_step, checked_tools
from headrace.actors.environments.base import ReplayedEnvironment
from headrace.actors.environments.off_loop import OffLoop
from headrace.platform.contracts import Environment
from headrace.platform.records.episode import Provenance
from headrace.platform.records.message import Message, Observation, StepResult, Task, ToolSpec

NOWHERE = Provenance()
"""Of a world that is played in the worker itself, and needs nothing there."""


class AsyncEnvironment(Protocol):
    """An `Environment` whose methods are all async, and which says where it stands."""

    name: str
    version: str

    @property
    def provenance(self) -> Provenance:
        """What the episode's record keeps of the world; may be asked at any time, also after `close`."""

    def tools(self) -> Sequence[ToolSpec]:
        """See `Environment.tools`."""

    async def reset(self, task: Task, seed: int) -> Observation:
        """See `Environment.reset`."""

    async def step(self, message: Message, key: str) -> StepResult:
        """See `Environment.step`."""

    async def close(self) -> None:
        """See `Environment.close`."""


async def finished(environment: AsyncEnvironment) -> None:
    """Tell a session that wants to know that its episode has ended well. What it raises ends the episode otherwise."""
    finish = getattr(environment, "finish_episode", None)
    if finish is not None:
        await finish()


def as_async(environment: Environment, executor: ThreadPoolExecutor) -> AsyncEnvironment:
    """`environment` itself when it is one of headrace's own and async throughout, else a wrapper around it.

    Whatever is plain in it runs in `executor`.
    """
    if isinstance(environment, ReplayedEnvironment):
        environment.use_threads(executor)
    methods = (environment.reset, environment.step, environment.close)
    is_own = type(environment).__module__.startswith("headrace.")
    if is_own and all(inspect.iscoroutinefunction(method) for method in methods):
        return cast(AsyncEnvironment, environment)
    return _AdaptedEnvironment(environment, executor)


class _AdaptedEnvironment:
    def __init__(self, environment: Environment, executor: ThreadPoolExecutor) -> None:
        self._environment = environment
        self._off_loop = OffLoop(executor)
        self._tools: Sequence[ToolSpec] = ()
        self.name = environment.name
        self.version = environment.version

    @property
    def inner(self) -> Environment:
        return self._environment

    @property
    def provenance(self) -> Provenance:
        return getattr(self._environment, "provenance", NOWHERE)

    def tools(self) -> Sequence[ToolSpec]:
        return self._tools

    async def reset(self, task: Task, seed: int) -> Observation:
        reset, tools = self._environment.reset, self._environment.tools
        observation = checked_observation(await self._off_loop.call(reset, task, seed), reset)
        self._tools = checked_tools(await self._off_loop.call(tools), tools)
        return observation

    async def step(self, message: Message, key: str) -> StepResult:
        step = self._environment.step
        return checked_step(await self._off_loop.call(step, message, key), step)

    async def close(self) -> None:
        await self._off_loop.call(self._environment.close)


class UnbuiltEnvironment:
    """Stands for a world whose constructor raised: its `reset` says so, where every fault is judged."""

    def __init__(self, name: str, error: Exception) -> None:
        self.name = name
        self.version = ""
        self.provenance = NOWHERE
        self._error = error

    def tools(self) -> Sequence[ToolSpec]:
        """None."""
        return ()

    async def reset(self, task: Task, seed: int) -> Observation:
        """Raise what the constructor raised."""
        raise self._error

    async def step(self, message: Message, key: str) -> StepResult:
        """Raise what the constructor raised."""
        raise self._error

    async def close(self) -> None:
        """Nothing to release."""
