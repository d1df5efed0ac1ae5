"""Snapshots by re-execution, for a world that is only `_reset` and `_step`."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from headrace.actors.environments.base import ReplayedEnvironment
from headrace.platform.errors import EnvironmentFault
from headrace.platform.hashing import hash_value
from headrace.platform.records import Message, Observation, Role, Status, StepResult, Task
from headrace.platform.testing.conformance.environment import ENVIRONMENT_SUITE, EnvironmentContext

TASK = Task("t", "ledger", {"limit": 4})


class Ledger(ReplayedEnvironment):
    """Adds what is said, in words; ends when `limit` things were said, by itself or by truncation."""

    name = "ledger"
    version = "1"

    def __init__(self, truncates=False):
        super().__init__()
        self.truncates = truncates
        self.said = []
        self.executed = 0

    def tools(self):
        return ()

    def _fresh(self):
        return Ledger(self.truncates)

    async def _reset(self, task, seed):
        self.said, self.limit = [seed], task.data["limit"]
        return Observation((Message(Role.USER, "say"),), hash_value(self.said))

    async def _step(self, message):
        self.executed += 1
        if message.content == "break":
            raise EnvironmentFault("broken")
        self.said.append(message.content)
        over = len(self.said) > self.limit
        return StepResult(
            (Message(Role.USER, str(len(self.said))),),
            terminated=over and not self.truncates,
            truncated=over and self.truncates,
            state_hash=hash_value(self.said),
        )


def say(text):
    return Message(Role.ASSISTANT, text)


@pytest.mark.parametrize("truncates", [False, True])
@pytest.mark.parametrize("name", [name for name in ENVIRONMENT_SUITE if "mistakes" not in name])
async def test_it_conforms(name, truncates):
    script = [say(text) for text in "abcd"]
    await ENVIRONMENT_SUITE[name](
        EnvironmentContext(make=lambda: Ledger(truncates), task=TASK, script=script, effect=say("a"))
    )


# case X3
async def test_a_retry_under_the_same_key_acts_once_and_another_key_twice():
    world = Ledger()
    await world.reset(TASK, 0)
    first = await world.step(say("a"), "k0")
    assert await world.step(say("a"), "k0") == first
    assert world.said == [0, "a"]
    await world.step(say("a"), "k1")
    assert world.said == [0, "a", "a"]


async def test_a_step_that_broke_has_no_result_under_its_key():
    world = Ledger()
    await world.reset(TASK, 0)
    for _ in range(2):
        with pytest.raises(EnvironmentFault):
            await world.step(say("break"), "k0")
    assert world.executed == 2
    assert (await world.clone()).said == [0], "and it is not part of the past"


async def test_a_known_key_is_answered_after_the_end_and_no_other_is():
    world = Ledger()
    await world.reset(TASK, 0)
    results = [await world.step(say(text), text) for text in "abcd"]
    assert results[-1].terminated
    assert await world.step(say("d"), "d") == results[-1]
    with pytest.raises(EnvironmentFault, match="after the end"):
        await world.step(say("e"), "e")


async def test_clones_go_on_alone_also_from_a_restored_state():
    world = Ledger()
    await world.reset(TASK, 5)
    await world.step(say("a"), "0")
    saved = await world.snapshot()
    await world.step(say("b"), "1")
    await world.restore(saved)
    twin = await world.clone()
    assert twin.said == world.said == [5, "a"]
    await twin.step(say("c"), "1")
    assert world.said == [5, "a"]
    await world.step(say("d"), "1")
    assert (await world.clone()).said == [5, "a", "d"], "the branch that was left is not part of the past"


async def test_a_restored_session_can_end_again():
    world = Ledger()
    await world.reset(TASK, 0)
    saved = await world.snapshot()
    for branch in ("one", "two"):
        results = [await world.step(say(text), f"{branch}/{text}") for text in "abcd"]
        assert results[-1].terminated
        await world.restore(saved)


async def test_snapshots_of_other_sessions_and_restores_before_reset_are_refused():
    world = Ledger()
    early = await world.snapshot()
    with pytest.raises(EnvironmentFault, match="before reset"):
        await world.restore(early)
    await world.reset(TASK, 0)
    with pytest.raises(EnvironmentFault, match="no snapshot"):
        await world.restore("ledger-step-9-9")


async def test_a_reset_begins_a_new_past():
    world = Ledger()
    await world.reset(TASK, 0)
    await world.step(say("a"), "k0")
    await world.reset(TASK, 1)
    await world.step(say("b"), "k0")
    assert world.said == (await world.clone()).said == [1, "b"]


class Plain(ReplayedEnvironment):
    """Plain methods, no constructor chain, no `_fresh`."""

    name, version = "plain", "1"

    def __init__(self, first, *, step=1):
        self.first, self.step_size = first, step

    def tools(self):
        return ()

    def _reset(self, task, seed):
        self._task = self._seed = self._log = self._ended = self._results = None  # names of its own
        self.at = self.first + seed
        return Observation((Message(Role.USER, "count"),), hash_value(self.at))

    def _step(self, message):
        if message.tool_calls:
            wrong = (Message(Role.TOOL, "there are no tools"),)
            return StepResult(wrong, status=Status.MODEL_INVALID_ACTION, state_hash=hash_value(self.at))
        self.at += self.step_size
        return StepResult(
            (Message(Role.USER, str(self.at)),), terminated=self.at > self.first + 6, state_hash=hash_value(self.at)
        )


@pytest.mark.parametrize("name", ENVIRONMENT_SUITE)
async def test_a_plain_world_conforms_and_is_made_anew_with_its_arguments(name):
    script = [say(text) for text in "abc"]
    await ENVIRONMENT_SUITE[name](
        EnvironmentContext(make=lambda: Plain(5, step=3), task=TASK, script=script, effect=say("a"))
    )


def test_arguments_are_refused_where_there_is_no_constructor():
    class Bare(Plain):
        __init__ = ReplayedEnvironment.__init__

    with pytest.raises(TypeError):
        Bare(5)


async def test_a_clone_uses_the_same_threads():
    with ThreadPoolExecutor(1) as executor:
        world = Plain(5)
        world.use_threads(executor)
        await world.reset(TASK, 0)
        assert (await world.clone())._off_loop.executor is executor
