"""Foreign code under a deadline that holds even for code that never gives control back.

Each call gets an event loop in a thread of its own. What outruns the deadline is left behind: neither it nor a plain
method that it waits for keeps the process from ending.
"""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from headrace.deploy.environment_check.sessions import Calls
from headrace.platform.errors import DeadlineExceeded

T = TypeVar("T")
# How much longer than the loop's own timer the caller waits: a loop that is not blocked ends its work in order.
_GRACE_S = 1.0
_LOOK_EVERY_S = 0.1


def within(deadline_s: float, act: Callable[[], Awaitable[T]], calls: Calls | None = None) -> T:
    """What `act` gives, or raises.

    Args:
        deadline_s: how long all of it may take.
        act: what to do.
        calls: those that have deadlines of their own, which hold even where `act` passes over them.

    Raises:
        DeadlineExceeded: it, or one of `calls`, took too long.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        with asyncio.Runner() as runner:
            runner.get_loop().set_default_executor(_LooseThreads())
            _settle(outcome, lambda: runner.run(_timed(deadline_s, act)))

    threading.Thread(target=run, daemon=True, name="environment check").start()
    ends = time.monotonic() + deadline_s + _GRACE_S
    while not outcome.done():
        wait([outcome], _LOOK_EVERY_S)
        if calls is not None and (stuck := calls.stuck(_GRACE_S)):
            raise DeadlineExceeded(stuck)
        if time.monotonic() > ends and not outcome.done():
            raise _late(deadline_s)
    if calls is not None and calls.late:
        raise DeadlineExceeded(calls.late)
    return outcome.result()


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
