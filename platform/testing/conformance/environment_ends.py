"""How an episode of an environment ends, and that every call of it does."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from headrace.platform.contracts import MaybeAwaitable
from headrace.platform.testing.conformance.environment_context import EnvironmentContext, check_same
from headrace.platform.testing.conformance.support import refusal, settled

T = TypeVar("T")
_ROUNDS = (1, 3)
"""How often the loop goes round before a call is cancelled: at its first await, and at a later one."""


async def the_script_ends_once(context: EnvironmentContext) -> None:
    """An episode ends by itself or by a limit, and nothing can be done afterwards."""
    session, _ = await context.begin()
    for number, message in enumerate(context.script):
        result = await settled(session.step(message, f"a/{number}"))
        is_last = number == len(context.script) - 1
        assert (result.terminated or result.truncated) == is_last, (
            f"step {number} of {len(context.script)} has terminated={result.terminated}, truncated={result.truncated};"
            " the context's script must end the episode with its last message"
        )
    error = await refusal(lambda: session.step(context.script[0], "after the end"))
    assert error is not None, "a step after the end was accepted; it must raise, or an episode silently goes on"
    await settled(session.snapshot())
    await settled(session.close())


async def terminated_is_not_truncated(context: EnvironmentContext) -> None:
    """The task ended, or a limit did: a learner goes on from the one with what it expects, from the other with nothing.

    A step that ends nothing has something to say, and no answer reports a fault: a fault is raised.
    """
    session, _ = await context.begin()
    for number, message in enumerate(context.script):
        result = await settled(session.step(message, f"a/{number}"))
        assert not (result.terminated and result.truncated), f"step {number} is terminated and truncated at once"
        assert not (result.terminated and result.status.is_truncated), (
            f"step {number} is terminated with status {result.status}; what a limit ended is truncated"
        )
        assert not result.status.is_error, f"step {number} answered {result.status}; a fault is raised, not answered"
        assert result.messages or result.terminated or result.truncated, f"step {number} says nothing and does not end"
    await settled(session.close())


async def calls_end_in_time(context: EnvironmentContext) -> None:
    """Every call answers within its deadline, and one that is cancelled leaves a session that can be closed, and none
    that is begun afterwards the worse for it (cases X4, X15)."""
    expected = await _one_life(context)
    for method in ("reset", "step"):
        for rounds in _ROUNDS:
            session = context.make()
            if method == "step":
                await settled(session.reset(context.task, context.seed))
                call: Callable[[], MaybeAwaitable[Any]] = partial(session.step, context.script[0], "cancelled")
            else:
                call = partial(session.reset, context.task, context.seed)
            await _cancelled(context, method, call, rounds)
            await _in_time(context, f"close after a cancelled {method}", session.close)
    check_same(await _one_life(context), expected, "after other sessions were cancelled and closed the episode is")


async def _one_life(context: EnvironmentContext) -> list[str]:
    """Every method of a session, each in time."""
    session = context.make()
    await _in_time(context, "reset", partial(session.reset, context.task, context.seed))
    snapshot_id = await _in_time(context, "snapshot", session.snapshot)
    twin = await _in_time(context, "clone", session.clone)
    await _in_time(context, "restore", partial(session.restore, snapshot_id))
    said: list[str] = []
    for number in range(len(context.script)):
        said += await _in_time(context, "step", partial(context.play, session, number, number + 1))
    await _in_time(context, "close", session.close)
    await _in_time(context, "close of a clone", twin.close)
    return said


async def _in_time(context: EnvironmentContext, what: str, act: Callable[[], MaybeAwaitable[T]]) -> T:
    began = time.monotonic()
    late = f"{what} gave no answer within {context.deadline_s:g} s"
    try:
        async with asyncio.timeout(context.deadline_s) as timer:
            answer = await settled(act())
    except TimeoutError:
        assert not timer.expired(), late
        raise
    assert time.monotonic() - began <= context.deadline_s, late  # a plain method cannot be interrupted
    return answer


async def _cancelled(
    context: EnvironmentContext, method: str, call: Callable[[], MaybeAwaitable[Any]], rounds: int
) -> None:
    """Begin a call and cancel it. A plain one cannot be, and an async one may have ended already."""
    value = call()
    if not isinstance(value, Awaitable):
        return
    waiting = asyncio.ensure_future(value)
    for _ in range(rounds):
        await asyncio.sleep(0)
    waiting.cancel()
    done, _ = await asyncio.wait({waiting}, timeout=context.deadline_s)
    assert done, f"{method} was cancelled and has not ended within {context.deadline_s:g} s"
    if not waiting.cancelled():
        waiting.exception()  # whatever it is, the session has only to be closed
