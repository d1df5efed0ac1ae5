"""Plain environments beside async ones: everything that an episode touches is async.

A plain method runs in a thread, so that one that blocks holds up its own session only (case E11). Calls of one session
never overlap: the episode awaits each, and what it stopped waiting for keeps the next one waiting.
"""

import asyncio
import inspect
import threading
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
        # A call that nobody waits for any more still runs in its thread; the next one, `close`, comes after it.
        self._busy = threading.Lock()
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
        answer = await loop.run_in_executor(self._executor, self._blocking, method, *args)
        return await answer if inspect.isawaitable(answer) else cast(T, answer)

    def _blocking(self, method: Callable[..., Any], *args: Any) -> Any:
        with self._busy:
            try:
                return method(*args)
            except StopIteration as error:  # a future cannot carry it: its waiter would wait for ever
                raise RuntimeError(f"{self.name} raised StopIteration") from error


class UnbuiltEnvironment:
    """Stands for a world whose constructor raised: its `reset` says so, where every fault is judged."""

    def __init__(self, name: str, error: Exception) -> None:
        self.name = name
        self.version = ""
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
