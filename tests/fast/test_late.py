"""Environments whose constructors block: they are built off the loop, under a deadline, and always closed."""

import asyncio
import sys
import textwrap
import threading
from types import SimpleNamespace

import pytest
from episode_kit import DONE, ends, make_plan, play, says

from headrace.actors.environments.adapter import NOWHERE, UnbuiltEnvironment, as_async
from headrace.actors.environments.base import ReplayedEnvironment
from headrace.actors.environments.late import Builder, LateEnvironment
from headrace.actors.oracle import Finding
from headrace.actors.world_resources import WorldResources
from headrace.actors.worlds import Worlds
from headrace.platform.config import EnvironmentConfig
from headrace.platform.config.faults import FaultConfig
from headrace.platform.errors import DeadlineExceeded, EnvironmentFault, NotFound
from headrace.platform.hashing import hash_value
from headrace.platform.records import AttemptId, Message, Observation, Role, Status, StepResult, Task

# What its constructor does is up to the test: `gates.build()` is called in every one but the first, which is a probe.
CODE = """
import late_gates as gates
import headrace


class Slow(headrace.ReplayedEnvironment):
    name, version = "slow", "3"
    made = 0

    def __init__(self):
        type(self).made += 1
        if type(self).made > 1:
            gates.build()

    @staticmethod
    def tasks(split, seed):
        return [headrace.Task(f"{split}-{n}", "slow", split=split) for n in range(4)]

    @staticmethod
    def demonstrate(task):
        return [headrace.Message(headrace.Role.ASSISTANT, "done")]

    def tools(self):
        gates.tools()
        return ()

    async def _reset(self, task, seed):
        said = await self.outside("which way", gates.ask)
        return headrace.Observation((headrace.Message(headrace.Role.USER, said),))

    def _step(self, message):
        outcome = headrace.RewardComponent(headrace.RewardKind.OUTCOME, 1.0)
        return headrace.StepResult(rewards=(outcome,), terminated=True)

    async def close(self):
        gates.closed.append(self)
        await super().close()
"""


@pytest.fixture
def gates(tmp_path, monkeypatch):
    """What the environment of `CODE` does, and the sessions that were closed."""
    gates = SimpleNamespace(build=lambda: None, tools=lambda: None, ask=lambda: "left", closed=[])
    monkeypatch.setitem(sys.modules, "late_gates", gates)
    (tmp_path / "slow.py").write_text(textwrap.dedent(CODE))
    return gates


def worlds(tmp_path, **fields):
    config = EnvironmentConfig(name=f"{tmp_path}/slow.py:Slow", **fields)
    return Worlds([config], "train", 0)


class Gate:
    """A call that blocks until the loop opens it."""

    def __init__(self):
        self.entered, self.free = threading.Event(), threading.Event()
        self.threads = []

    def __call__(self):
        self.threads.append(threading.current_thread())
        self.entered.set()
        assert self.free.wait(10), "the loop never came to open it"
        return "left"


def playing_in(session, **fields):
    return asyncio.create_task(play(session, says(DONE), plan=make_plan(**fields)))


# case E11
@pytest.mark.parametrize("where", ["build", "tools", "ask"])
async def test_what_blocks_lets_the_loop_go_on(gates, tmp_path, where):
    gate, mine = Gate(), worlds(tmp_path)
    setattr(gates, where, gate)
    playing = [playing_in(mine.session(mine.setting(group)), sample=group) for group in range(3)]
    assert await asyncio.to_thread(gate.entered.wait, 10)
    assert not any(task.done() for task in playing)
    gate.free.set()
    played = await asyncio.gather(*playing)
    assert [each.score for each in played] == [1.0] * 3
    assert {(each.episode.environment, each.episode.environment_version) for each in played} == {("slow", "3")}
    assert threading.current_thread() not in gate.threads and len(gate.threads) == 3
    assert len(gates.closed) == 3


# case X15
async def test_a_constructor_that_hangs_ends_by_the_deadline_of_the_reset_and_is_closed_later(gates, tmp_path):
    gates.build, mine = Gate(), worlds(tmp_path)
    played = await play(mine.session(mine.setting(0)), says(DONE), plan=make_plan(reset_deadline_s=0.1))
    episode = played.episode
    assert (episode.status, episode.fault, played.score) == (
        Status.ENV_TRANSIENT,
        "reset outran its deadline",
        None,
    )
    assert (episode.environment, episode.environment_version, episode.fault_owner) == ("slow", "3", "environment")
    assert gates.closed == []
    gates.build.free.set()
    await mine.resources.close()
    assert len(gates.closed) == 1


# case X4
async def test_a_cancelled_episode_closes_what_is_built_after_it(gates, tmp_path):
    gates.build, mine = Gate(), worlds(tmp_path)
    task = playing_in(mine.session(mine.setting(0)))
    assert await asyncio.to_thread(gates.build.entered.wait, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gates.build.free.set()
    await mine.resources.close()
    assert len(gates.closed) == 1


@pytest.mark.parametrize("error", [OSError("no room"), SystemExit(3), StopIteration("spent")])
async def test_a_constructor_that_raises_is_the_environments_fault(gates, tmp_path, error):
    def build():
        raise error

    gates.build, mine = build, worlds(tmp_path)
    played = await play(mine.session(mine.setting(0)), says(DONE))
    assert (played.episode.status, played.episode.fault_owner) == (Status.ENV_BUG, "environment")
    assert type(error).__name__ in played.episode.fault
    assert (played.episode.environment, played.episode.environment_version) == ("slow", "3")


async def test_faults_are_put_into_a_session_that_is_built_late(gates, tmp_path):
    mine = worlds(tmp_path, faults=[FaultConfig(kind="timeout", steps=(1,), seconds=0.01)])
    session = mine.session(mine.setting(0), AttemptId("r", 0, 0))
    assert (session.name, session.version) == ("slow", "3")
    played = await play(session, says(DONE))
    assert [fault.kind for fault in played.episode.injected_faults] == ["timeout"]


async def test_the_oracle_waits_for_a_constructor_off_the_loop(gates, tmp_path):
    gates.build, mine = Gate(), worlds(tmp_path)
    asking = asyncio.create_task(mine.verdict_on(mine.setting(0).config.known_as, mine.setting(0).task, 0))
    assert await asyncio.to_thread(gates.build.entered.wait, 10)
    gates.build.free.set()
    assert (await asking).finding is Finding.WORKS


@pytest.mark.parametrize("error", [None, OSError("no room"), SystemExit(3)])
async def test_the_oracle_knows_nothing_of_what_cannot_be_built(gates, tmp_path, error):
    gate = Gate()

    def build():
        if error is None:
            gate()
        else:
            raise error

    gates.build, mine = build, worlds(tmp_path, reset_deadline_s=0.2)
    verdict = await mine.verdict_on(mine.setting(0).config.known_as, mine.setting(0).task, 0)
    assert verdict.finding is Finding.UNKNOWN
    gate.free.set()


class TestToBePlayedAgain:
    async def test_it_is_built_before_its_reset_and_takes_the_cassette(self, gates, tmp_path):
        gates.build, mine = Gate(), worlds(tmp_path)
        gates.build.free.set()
        played = await play(mine.session(mine.setting(0)), says(DONE), plan=make_plan(mine.setting(0).task))
        gates.build = Gate()
        building = asyncio.create_task(mine.session_of(played.episode))
        assert await asyncio.to_thread(gates.build.entered.wait, 10)
        gates.build.free.set()
        session = await building
        assert session.load_cassette(played.episode.external) is not None
        gates.ask = lambda: "right"
        observation = await session.reset(played.episode.task, 7)
        assert observation.messages[0].content == "left"
        await session.close()

    async def test_one_that_takes_too_long_fails_in_its_reset(self, gates, tmp_path):
        mine = worlds(tmp_path, reset_deadline_s=0.1)
        played = await play(mine.session(mine.setting(0)), says(DONE), plan=make_plan(mine.setting(0).task))
        gates.build = Gate()
        session = await mine.session_of(played.episode)
        with pytest.raises(DeadlineExceeded, match=r"slow was not built within 0\.1 s"):
            await session.reset(played.episode.task, 7)
        closed = len(gates.closed)
        gates.build.free.set()
        await mine.resources.close()
        assert len(gates.closed) == closed + 1

    async def test_who_stops_waiting_leaves_nothing(self, gates, tmp_path):
        mine = worlds(tmp_path)
        played = await play(mine.session(mine.setting(0)), says(DONE), plan=make_plan(mine.setting(0).task))
        gates.build, before = Gate(), len(gates.closed)
        building = asyncio.create_task(mine.session_of(played.episode))
        assert await asyncio.to_thread(gates.build.entered.wait, 10)
        building.cancel()
        with pytest.raises(asyncio.CancelledError):
            await building
        gates.build.free.set()
        await mine.resources.close()
        assert len(gates.closed) == before + 1

    async def test_an_environment_that_the_recipe_has_not_is_named(self, gates, tmp_path):
        played = await play(worlds(tmp_path).session(worlds(tmp_path).setting(0)), says(DONE))
        with pytest.raises(NotFound, match="counter"):
            await worlds(tmp_path).session_of(played.episode)


class TestTheStandIn:
    """Its own methods, around a session that says what it is asked."""

    @pytest.fixture
    def resources(self):
        resources = WorldResources()
        yield resources
        resources.threads.shutdown()

    def late(self, resources, build):
        return LateEnvironment("late", "1", build, resources.builder)

    async def test_before_its_reset_it_has_nothing(self, resources):
        built = []
        session = self.late(resources, lambda: built.append(1))
        assert (session.inner, session.provenance, session.tools()) == (None, NOWHERE, ())
        with pytest.raises(EnvironmentFault, match="step before reset"):
            await session.step(Message(Role.ASSISTANT, "x"), "k")
        await session.close()
        assert not built

    async def test_it_is_built_once_and_then_is_the_session(self, resources):
        built = []

        def build():
            built.append(UnbuiltEnvironment("real", OSError("full")))
            return built[0]

        session = self.late(resources, build)
        for _ in range(2):
            with pytest.raises(OSError, match="full"):
                await session.reset(Task("t", "late"), 0)
        assert session.inner is built[0] and len(built) == 1
        assert (session.name, session.version) == ("late", "1"), "what cannot be built is still known"
        await session.close()
        await session.close()

    async def test_what_was_left_twice_is_closed_once(self, resources):
        gate, closed = Gate(), []

        class Closes(UnbuiltEnvironment):
            async def close(self):
                closed.append(self)

        def build():
            gate()
            return Closes("x", OSError())

        session = self.late(resources, build)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(session.reset(Task("t", "late"), 0), 0.05)
        await session.close()
        await session.close()
        gate.free.set()
        await resources.close()
        assert len(closed) == 1

    async def test_one_that_does_not_close_is_logged(self, resources, caplog):
        gate = Gate()

        class Stays(UnbuiltEnvironment):
            async def close(self):
                raise SystemExit("no")

        def build():
            gate()
            return Stays("x", OSError())

        session = self.late(resources, build)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(session.reset(Task("t", "late"), 0), 0.05)
        await session.close()
        gate.free.set()
        await resources.close()
        assert "came too late is not closed: SystemExit: no" in caplog.text

    async def test_one_that_is_never_built_does_not_hold_the_end_for_ever(self, resources, caplog, monkeypatch):
        monkeypatch.setattr("headrace.actors.environments.late._CLOSE_S", 0.05)
        gate = Gate()

        def build():
            gate()
            return UnbuiltEnvironment("x", OSError())

        builder = Builder(resources.threads)
        builder.leave(builder.begin(build))
        await builder.close()
        assert "1 environments are still being built" in caplog.text
        gate.free.set()
        await builder.close()


# case E11
async def test_a_clone_is_made_off_the_loop():
    made = []

    class Twin(ReplayedEnvironment):
        name, version = "twin", "1"

        def __init__(self):
            made.append(threading.current_thread())

        def tools(self):
            return ()

        async def _reset(self, task, seed):
            return Observation((Message(Role.USER, "go"),), hash_value(seed))

        async def _step(self, message) -> StepResult:
            return ends(1.0)

    resources = WorldResources()
    session = as_async(Twin(), resources.threads)
    await session.reset(Task("t", "twin"), 0)
    await (await session.inner.clone()).close()
    here, other = made
    assert here is threading.current_thread() is not other
    resources.threads.shutdown()
