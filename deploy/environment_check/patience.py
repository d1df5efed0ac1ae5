"""Foreign code under a deadline that holds even for code that never gives control back.

Each call gets an event loop in a thread of its own. What outruns the deadline is left behind: neither it nor a plain
method that it waits for keeps the process from ending.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from headrace.platform.errors import DeadlineExceeded

T = TypeVar("T")
# How much longer than the loop's own timer the caller waits: a loop that is not blocked ends its work in order.
_GRACE_S = 1.0


def within(deadline_s: float, act: Callable[[], Awaitable[T]]) -> T:
    """What `act` gives, or raises.

    Raises:
        DeadlineExceeded: it took longer than `deadline_s`.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        with asyncio.Runner() as runner:
            runner.get_loop().set_default_executor(_LooseThreads())
            _settle(outcome, lambda: runner.run(_timed(deadline_s, act)))

    threading.Thread(target=run, daemon=True, name="environment check").start()
    try:
        return outcome.result(deadline_s + _GRACE_S)
    except TimeoutError:
        if outcome.done():  # it raised a time-out of its own
            raise
        raise _late(deadline_s) from None


async def _timed(deadline_s: float, act: Callable[[], Awaitable[T]]) -> T:
    try:
        async with asyncio.timeout(deadline_s) as timer:
            return await act()
    except TimeoutError:
        if timer.expired():
            raise _late(deadline_s) from None
        raise


def _late(deadline_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"no answer within {deadline_s:g} s")


def _settle(future: Future[Any], call: Callable[[], Any]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # whatever foreign code raises, the waiter judges it
        future.set_exception(error)


class _LooseThreads(ThreadPoolExecutor):
    """A thread for each call, which nobody waits for at the end: those of the base class keep a process alive."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """See `Executor.submit`."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        threading.Thread(target=_settle, args=(future, lambda: fn(*args, **kwargs)), daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Nothing is waited for."""
