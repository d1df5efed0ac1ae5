"""Plain environments off the event loop: overlapping between sessions, never within one."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from episode_kit import DONE, ends, goes_on, make_plan, play, says

from headrace.actors.environments.adapter import UnbuiltEnvironment, as_async
from headrace.actors.environments.lookup import LookupEnvironment
from headrace.platform.errors import EnvironmentFault
from headrace.platform.records import Message, Observation, Role, Status


class Plain:
    """A plain environment made of functions that may block."""

    name = "plain"
    version = "1"

    def __init__(self, step=lambda: ends(1.0), reset=lambda: None):
        self._step, self._reset = step, reset
        self.happened = []
        self.threads = set()

    def tools(self):
        return ()

    def reset(self, task, seed):
        self._did("reset")
        self._reset()
        return Observation((Message(Role.USER, "go"),))

    def step(self, message, key):
        self._did("step")
        return self._step()

    def close(self):
        self._did("close")

    def _did(self, what):
        self.happened.append(what)
        self.threads.add(threading.current_thread())


@pytest.fixture
def executor():
    with ThreadPoolExecutor(64) as pool:
        yield pool


async def test_an_async_environment_is_used_as_it_is(executor):
    environment = LookupEnvironment()
    assert as_async(environment, executor) is environment
    assert not executor._threads


async def test_plain_methods_run_off_the_loop(executor):
    environment = Plain()
    played = await play(as_async(environment, executor), says(DONE))
    assert (played.score, environment.happened) == (1.0, ["reset", "step", "close"])
    assert threading.current_thread() not in environment.threads


# case E11
async def test_32_blocking_environments_step_at_the_same_time(executor):
    """All 32 stand in `step` at once, or the barrier breaks."""
    together = threading.Barrier(32)

    def step():
        together.wait(timeout=10)
        time.sleep(0.2)
        return ends(1.0)

    began = time.monotonic()
    played = await asyncio.gather(
        *(play(as_async(Plain(step), executor), says(DONE), plan=make_plan(sample=n)) for n in range(32))
    )
    assert [each.score for each in played] == [1.0] * 32
    assert time.monotonic() - began < 5.0


async def test_a_blocking_step_does_not_hold_the_loop(executor):
    free = threading.Event()

    def step():
        assert free.wait(10), "the loop never came to set it"
        return ends(1.0)

    task = asyncio.create_task(play(as_async(Plain(step), executor), says(DONE)))
    await asyncio.sleep(0)
    free.set()
    assert (await task).score == 1.0


# case X15
@pytest.mark.parametrize("where", ["reset", "step"])
async def test_a_call_that_hangs_is_left_and_close_comes_after_it(executor, where):
    free = threading.Event()

    def hang():
        free.wait(10)
        environment.happened.append("came back")
        return ends(1.0)

    environment = Plain(**{where: hang})
    plan = make_plan(reset_deadline_s=0.1, step_deadline_s=0.1)
    played = await play(as_async(environment, executor), says(DONE), plan=plan)
    assert played.episode.fault == f"{where} outran its deadline"
    assert (played.episode.status, played.score) == (Status.ENV_TRANSIENT, None)
    assert "close" not in environment.happened, "a session's calls never overlap"
    free.set()
    await asyncio.to_thread(executor.shutdown)
    assert environment.happened[-2:] == ["came back", "close"]


@pytest.mark.parametrize("error", [StopIteration("exhausted"), KeyError("k"), EnvironmentFault("x", transient=False)])
async def test_what_a_plain_step_raises_arrives_at_once(executor, error):
    def step():
        raise error

    played = await asyncio.wait_for(play(as_async(Plain(step), executor), says(DONE)), 5)
    assert (played.episode.status, played.episode.fault_owner) == (Status.ENV_BUG, "environment")
    assert type(error).__name__ in played.episode.fault


async def test_a_plain_method_may_return_an_awaitable(executor):
    async def later():
        await asyncio.sleep(0)
        return ends(0.5)

    assert (await play(as_async(Plain(later), executor), says(DONE))).score == 0.5


async def test_methods_may_be_mixed(executor):
    class Mixed(Plain):
        async def step(self, message, key):
            self._did("step")
            return goes_on() if self.happened.count("step") == 1 else ends(1.0)

    environment = Mixed()
    assert (await play(as_async(environment, executor), says(DONE))).score == 1.0
    assert environment.happened == ["reset", "step", "step", "close"]


async def test_a_cancelled_episode_closes_a_plain_world(executor):
    entered, free = threading.Event(), threading.Event()

    def step():
        entered.set()
        free.wait(10)
        return ends(1.0)

    environment = Plain(step)
    task = asyncio.create_task(play(as_async(environment, executor), says(DONE)))
    await asyncio.to_thread(entered.wait, 10)
    task.cancel()
    free.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(executor.shutdown)
    assert environment.happened == ["reset", "step", "close"]


async def test_an_unbuilt_world_says_why_and_closes():
    world = UnbuiltEnvironment("x", OSError("full"))
    assert world.tools() == ()
    for call in (world.reset(make_plan().task, 0), world.step(Message(Role.ASSISTANT), "k")):
        with pytest.raises(OSError, match="full"):
            await call
    await world.close()


async def test_a_wrapped_world_keeps_its_name(executor):
    wrapped = as_async(Plain(), executor)
    assert (wrapped.name, wrapped.version, wrapped.tools()) == ("plain", "1", ())
