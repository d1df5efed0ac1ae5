"""Plain environments beside async ones: everything that an episode touches is async.

A plain method runs in a thread, so that one that blocks holds up its own session only (case E11). Calls of one session
never overlap, for the episode awaits each.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar, cast

from headrace.platform.contracts import Environment
from headrace.platform.records.message import Message, Observation, StepResult, Task, ToolSpec

T = TypeVar("T")


class AsyncEnvironment(Protocol):
    """An `Environment` whose methods are all async."""

    name: str
    version: str

    def tools(self) -> Sequence[ToolSpec]:
        """See `Environment.tools`."""

    async def reset(self, task: Task, seed: int) -> Observation:
        """See `Environment.reset`."""

    async def step(self, message: Message, key: str) -> StepResult:
        """See `Environment.step`."""

    async def close(self) -> None:
        """See `Environment.close`."""


def as_async(environment: Environment, executor: ThreadPoolExecutor) -> AsyncEnvironment:
    """`environment` itself when it is async throughout, else a wrapper that runs its plain methods in `executor`."""
    methods = (environment.reset, environment.step, environment.close)
    if all(inspect.iscoroutinefunction(method) for method in methods):
        return cast(AsyncEnvironment, environment)
    return _ThreadedEnvironment(environment, executor)


class _ThreadedEnvironment:
    def __init__(self, environment: Environment, executor: ThreadPoolExecutor) -> None:
        self._environment = environment
        self._executor = executor
        self.name = environment.name
        self.version = environment.version

    def tools(self) -> Sequence[ToolSpec]:
        return self._environment.tools()

    async def reset(self, task: Task, seed: int) -> Observation:
        return await self._call(self._environment.reset, task, seed)

    async def step(self, message: Message, key: str) -> StepResult:
        return await self._call(self._environment.step, message, key)

    async def close(self) -> None:
        await self._call(self._environment.close)

    async def _call(self, method: Callable[..., T | Awaitable[T]], *args: Any) -> T:
        if inspect.iscoroutinefunction(method):
            return await cast(Awaitable[T], method(*args))
        loop = asyncio.get_running_loop()
        return cast(T, await loop.run_in_executor(self._executor, method, *args))
