"""The one timer of an episode: what it ends, and what it leaves alone."""

import asyncio
import time

import pytest

from headrace.actors.deadline import Deadline


async def for_ever():
    await asyncio.Event().wait()


def allow(deadline, what, seconds):
    deadline.allow(what, time.monotonic(), seconds)


async def test_a_wait_that_outlasts_its_limit_is_a_timeout_and_nothing_else_is_left():
    deadline = Deadline(60.0)
    for what in ("reset", "step"):  # once and again
        allow(deadline, what, 0.01)
        with pytest.raises(TimeoutError, match=f"{what} outran its deadline"), deadline:
            await for_ever()
    assert asyncio.current_task().cancelling() == 0
    assert not deadline.budget_is_spent


async def test_the_budget_ends_every_wait_until_it_is_lifted():
    deadline = Deadline(0.01)
    allow(deadline, "step", 60.0)
    with pytest.raises(TimeoutError), deadline:
        await for_ever()
    assert deadline.budget_is_spent
    deadline.lift_budget()
    allow(deadline, "close", 60.0)
    with deadline:
        await asyncio.sleep(0.02)
    deadline.disarm()


async def test_something_that_swallows_its_cancellation_is_ended_by_the_next_limit():
    deadline, swallowed = Deadline(60.0), []
    with pytest.raises(TimeoutError, match="second"), deadline:
        allow(deadline, "first", 0.01)
        try:
            await for_ever()
        except asyncio.CancelledError as error:
            swallowed.append(error)
        allow(deadline, "second", 0.01)
        await for_ever()
    assert len(swallowed) == 1
    assert asyncio.current_task().cancelling() == 0


async def test_a_cancellation_from_elsewhere_stays_one_even_beside_the_timer():
    deadlines, waiting = [], asyncio.Event()

    async def wait():
        deadlines.append(Deadline(60.0))
        allow(deadlines[0], "step", 60.0)
        with deadlines[0]:
            waiting.set()
            await for_ever()

    task = asyncio.create_task(wait())
    await waiting.wait()
    allow(deadlines[0], "step", -1.0)  # due at once: both come in one turn of the event loop
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    deadlines[0].disarm()


async def test_a_limit_that_is_met_costs_one_timer(monkeypatch):
    loop, armed = asyncio.get_running_loop(), []
    call_at = loop.call_at
    monkeypatch.setattr(loop, "call_at", lambda *a, **k: armed.append(call_at(*a, **k)) or armed[-1])
    deadline = Deadline(60.0)
    for _ in range(5):
        allow(deadline, "step", 30.0)
        with deadline:
            await asyncio.sleep(0)
    deadline.disarm()
    assert [handle.cancelled() for handle in armed] == [True]
