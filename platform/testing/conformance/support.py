"""What the suites share: running all of one, awaiting what may be plain, and expecting a refusal."""

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from headrace.platform.contracts import MaybeAwaitable

T = TypeVar("T")
Context = TypeVar("Context")


async def run_suite(suite: Mapping[str, Callable[[Context], Awaitable[None]]], context: Context) -> None:
    """Run every function of a suite, each to its end, whatever the others do.

    Raises:
        AssertionError: one that lists all that is wrong.
    """
    wrong = []
    for name, check in suite.items():
        try:
            await check(context)
        except Exception as error:  # foreign code is under test: anything may come out of it
            wrong.append(f"{name}: {error if isinstance(error, AssertionError) else repr(error)}")
    if wrong:
        raise AssertionError(f"{len(wrong)} of {len(suite)} checks do not hold:\n" + "\n".join(wrong))


async def settled(value: MaybeAwaitable[T]) -> T:
    """What a method that may be plain or async gives."""
    if inspect.isawaitable(value):
        return await value
    return value


async def refusal(act: Callable[[], MaybeAwaitable[Any]]) -> Exception | None:
    """What `act` raises, or None when it does not."""
    try:
        await settled(act())
    except Exception as error:  # any exception is a refusal
        return error
    return None


def survives_json(value: Any) -> bool:
    """Whether `value` is the same after JSON, as metadata must be to survive every hop (case X16)."""
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError):
        return False
