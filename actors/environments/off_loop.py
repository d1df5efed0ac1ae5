"""Plain functions beside async ones: what blocks runs in a thread, one call of a session at a time (case E11)."""

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

T = TypeVar("T")


class OffLoop:
    """Calls the functions of one session.

    A call that nobody waits for any more still runs in its thread, and the next one comes after it: the calls of one
    session never overlap.

    Args:
        executor: where plain functions run; None is the event loop's own pool, which has few threads.
    """

    def __init__(self, executor: ThreadPoolExecutor | None = None) -> None:
        self.executor = executor
        self._busy = threading.Lock()

    async def call(self, function: Callable[..., T | Awaitable[T]], *args: Any) -> T:
        """What `function` returns, awaited if it is an awaitable."""
        if inspect.iscoroutinefunction(function):
            return await cast(Awaitable[T], function(*args))
        loop = asyncio.get_running_loop()
        answer = await loop.run_in_executor(self.executor, self._blocking, function, *args)
        return await answer if inspect.isawaitable(answer) else cast(T, answer)

    def _blocking(self, function: Callable[..., Any], *args: Any) -> Any:
        with self._busy:
            try:
                return function(*args)
            except StopIteration as error:  # a future cannot carry it: its waiter would wait for ever
                name = getattr(function, "__qualname__", "a function")
                raise RuntimeError(f"{name} raised StopIteration") from error
