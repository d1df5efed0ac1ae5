"""The oracle: what an environment's own demonstration says about a task (P27)."""

import asyncio

import pytest
from episode_kit import World, ends, goes_on, never, raises

from headrace.actors.environments.adapter import as_async
from headrace.actors.environments.lookup import LookupEnvironment
from headrace.actors.oracle import TRIES, Finding, OracleVerdict, demonstration_of, oracle_verdict
from headrace.platform.errors import DeadlineExceeded, EnvironmentFault, HostAway, SandboxDied
from headrace.platform.records import Message, RewardComponent, RewardKind, Role, Status, StepResult, Task, ToolCall

TASK = Task("t", "world")
SHOWN = (Message(Role.ASSISTANT, "one"), Message(Role.ASSISTANT, "two"))


class Bench:
    """Makes worlds and counts them; each has a `step` of its own from `begin`."""

    def __init__(self, begin, reset=None):
        self.begin, self.reset = begin, reset
        self.worlds = []

    def __call__(self):
        self.worlds.append(World(self.begin(), self.reset))
        return self.worlds[-1]

    async def verdict(self, shown=SHOWN, deadline_s=5.0):
        demonstrate = shown if callable(shown) or shown is None else lambda task: shown
        found = await oracle_verdict(self, TASK, 7, demonstrate, deadline_s, deadline_s)
        assert all(world.closed == 1 for world in self.worlds), "a session of the oracle is open"
        return found


def script(*answers):
    """A world that answers so, in each session from the beginning."""

    def begin():
        left = iter(answers)
        return lambda message: next(left)

    return begin


async def test_a_demonstration_that_earns_something_works():
    bench = Bench(script(goes_on(), ends(1.0)))
    assert await bench.verdict() == OracleVerdict(Finding.WORKS)
    (world,) = bench.worlds
    assert world.resets == [(TASK, 7)]
    assert world.messages == list(SHOWN)
    assert len(set(world.keys)) == 2, "every step has its own key"


def rewarded(*components, **fields):
    return StepResult(rewards=tuple(RewardComponent(*each) for each in components), terminated=True, **fields)


@pytest.mark.parametrize(
    ("answers", "finding", "cause"),
    [
        ([goes_on(), StepResult(terminated=True)], Finding.WORKS, ""),  # a scorer grades it
        ([goes_on(), rewarded((RewardKind.OUTCOME, 0.5), (RewardKind.COST, -2.0))], Finding.WORKS, ""),
        (
            [goes_on(rewards=(RewardComponent(RewardKind.PROCESS, 1.0),)), StepResult(terminated=True)],
            Finding.WORKS,
            "",
        ),
        ([goes_on(status=Status.MODEL_INVALID_ACTION), ends(1.0)], Finding.WORKS, ""),
        ([goes_on(), ends(0.0)], Finding.BROKEN, "its demonstration earns 0"),
        ([goes_on(), rewarded((RewardKind.OUTCOME, 1.0, False))], Finding.BROKEN, "is not valid"),
        ([goes_on(), goes_on()], Finding.BROKEN, "it goes on after all that is demonstrated"),
        ([ends(1.0)], Finding.BROKEN, "it ends after 1 of the 2 messages"),
        ([goes_on(), StepResult(truncated=True)], Finding.BROKEN, "a limit ends its demonstration"),
        ([goes_on(), rewarded(status=Status.SAFETY_BLOCK)], Finding.BROKEN, "blocked for safety"),
        ([goes_on(), StepResult(terminated=True, truncated=True)], Finding.BROKEN, "terminated and truncated at once"),
    ],
)
async def test_what_a_demonstration_comes_to(answers, finding, cause):
    bench = Bench(script(*answers))
    found = await bench.verdict()
    assert found.finding is finding
    assert cause in found.cause and bool(found.cause) == bool(cause)
    assert len(bench.worlds) == 1, "what is sure is not tried again"


@pytest.mark.parametrize(
    ("error", "finding", "tries"),
    [
        (KeyError("board"), Finding.BROKEN, 1),
        (EnvironmentFault("asserts", transient=False), Finding.BROKEN, 1),
        (SystemExit(3), Finding.BROKEN, 1),
        (EnvironmentFault("its server is away"), Finding.BROKEN, TRIES),
        (DeadlineExceeded("its own"), Finding.BROKEN, TRIES),
        (asyncio.CancelledError("from inside"), Finding.BROKEN, 1),
        (SandboxDied("killed"), Finding.UNKNOWN, TRIES),
        (HostAway("draining"), Finding.UNKNOWN, TRIES),
    ],
)
@pytest.mark.parametrize("where", ["reset", "step"])
async def test_faults_of_a_demonstration(error, finding, tries, where):
    bench = Bench(lambda: raises(error)) if where == "step" else Bench(script(ends(1.0)), raises(error))
    found = await bench.verdict()
    assert (found.finding, len(bench.worlds)) == (finding, tries)
    assert found.cause


async def test_a_reset_that_fails_at_random_does_not_condemn_a_task():  # case E18
    failures = iter([EnvironmentFault("lost"), EnvironmentFault("lost"), None])

    def reset():
        if (error := next(failures)) is not None:
            raise error
        return World()._reset()

    bench = Bench(script(goes_on(), ends(1.0)), reset)
    assert await bench.verdict() == OracleVerdict(Finding.WORKS)
    assert len(bench.worlds) == 3, "each time in a fresh session"


async def test_an_answered_fault_is_a_fault():
    found = await Bench(script(goes_on(status=Status.ENV_BUG))).verdict()
    assert found == OracleVerdict(Finding.BROKEN, "EnvironmentFault: world answered ENV_BUG")


@pytest.mark.parametrize("where", ["reset", "step"])
async def test_what_hangs_is_broken_in_time(where):
    bench = Bench(script(ends(1.0)), never) if where == "reset" else Bench(lambda: never)
    async with asyncio.timeout(5):
        found = await bench.verdict(deadline_s=0.05)
    late = "the demonstration's reset" if where == "reset" else "step 1 of the demonstration"
    assert found == OracleVerdict(Finding.BROKEN, f"{late} outran its deadline")
    assert len(bench.worlds) == TRIES


async def test_a_long_demonstration_may_take_as_long_as_its_steps_may():
    async def slow(message):
        await asyncio.sleep(0.06)
        return goes_on() if message is not SHOWN[-1] else ends(1.0)

    assert (await Bench(lambda: slow).verdict(deadline_s=0.1)).finding is Finding.WORKS


def fails(task):
    raise KeyError("chain")


def stops(task):
    raise StopIteration


@pytest.mark.parametrize(
    "shown", [None, fails, stops, [], ["one"], [Message(Role.USER, "one")], lambda task: None], ids=str
)
async def test_who_demonstrates_nothing_is_not_condemned(shown):
    bench = Bench(script(ends(1.0)))
    found = await bench.verdict(shown)
    assert found.finding is Finding.UNKNOWN
    assert found.cause and not bench.worlds


async def test_a_close_that_fails_spoils_no_verdict():
    class Stuck(World):
        async def close(self):
            await super().close()
            raise OSError("busy")

    found = await oracle_verdict(lambda: Stuck(), TASK, 0, lambda task: SHOWN[:1], 5.0, 5.0)
    assert found.finding is Finding.WORKS


@pytest.mark.parametrize("where", ["reset", "step", "close"])
async def test_a_cancelled_oracle_leaves_nothing_open(where):  # case X4
    reached = asyncio.Event()

    async def wait_once(name):
        if name == where and not reached.is_set():
            reached.set()
            await asyncio.Event().wait()

    class Waiting(World):
        async def reset(self, task, seed):
            await wait_once("reset")
            return await super().reset(task, seed)

        async def step(self, message, key):
            await wait_once("step")
            return await super().step(message, key)

        async def close(self):
            await wait_once("close")
            await super().close()

    world = Waiting()
    asking = asyncio.create_task(oracle_verdict(lambda: world, TASK, 0, lambda task: SHOWN[:1], 5.0, 5.0))
    await reached.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert world.closed >= 1


class Shown(LookupEnvironment):
    """Lookup with its demonstration."""

    @staticmethod
    def demonstrate(task):
        reads = [
            Message(Role.ASSISTANT, tool_calls=(ToolCall("get", {"key": key}, "c"),)) for key in task.data["chain"]
        ]
        return [*reads, Message(Role.ASSISTANT, task.data["answer"])]


@pytest.mark.parametrize(
    ("data", "finding"),
    [
        ({"chain": ["k01", "k02"], "answer": "v03"}, Finding.WORKS),
        ({"chain": [], "answer": "v03"}, Finding.BROKEN),
        ({"chain": ["k01"]}, Finding.UNKNOWN),
    ],
)
async def test_the_oracle_of_a_real_world(data, finding):
    task = Task("t", "lookup", data)
    found = await oracle_verdict(lambda: as_async(Shown(), None), task, 1, demonstration_of(Shown()), 5.0, 5.0)
    assert found.finding is finding
