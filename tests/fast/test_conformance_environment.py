import msgspec
import pytest

from headrace.platform.records import Message, Role, Task, ToolCall
from headrace.platform.testing.conformance.environment import ENVIRONMENT_SUITE, EnvironmentContext
from headrace.platform.testing.conformance.support import run_suite
from headrace.platform.testing.fakes.environment import ScriptedEnvironment


def add(amount):
    return Message(Role.ASSISTANT, tool_calls=(ToolCall("add", {"amount": amount}, "call-0"),))


SCRIPT = (add(1), add(2), Message(Role.ASSISTANT, "done"))


def counter(make=ScriptedEnvironment):
    return EnvironmentContext(make=make, task=Task("t", "counter"), script=SCRIPT, effect=add(1))


@pytest.mark.parametrize("name", ENVIRONMENT_SUITE)
async def test_the_fake_conforms(name):
    await ENVIRONMENT_SUITE[name](counter())


async def test_an_episode_that_a_limit_ends_conforms():
    task = Task("t", "counter", {"max_steps": 3})
    await run_suite(
        ENVIRONMENT_SUITE,
        EnvironmentContext(make=ScriptedEnvironment, task=task, script=[add(1)] * 3, effect=add(1)),
    )


class Plain(ScriptedEnvironment):
    """The same world with plain methods."""

    def reset(self, task, seed):
        return drive(super().reset(task, seed))

    def step(self, message, key):
        return drive(super().step(message, key))


def drive(coroutine):
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("the fake never waits")


async def test_plain_methods_conform():
    await run_suite(ENVIRONMENT_SUITE, counter(Plain))


async def test_the_counter_is_a_task():
    environment = ScriptedEnvironment()
    await environment.reset(Task("t", "counter", {"target": 3}), seed=1)
    assert (await environment.step(add(2), "0")).messages[0].content == "The counter is at 3."
    assert (await environment.step(Message(Role.ASSISTANT, "done"), "1")).rewards[0].value == 1
    await environment.reset(Task("t", "counter", {"target": 3}), seed=0)
    assert (await environment.step(Message(Role.ASSISTANT, "done"), "0")).rewards[0].value == 0


class ForgetsKeys(ScriptedEnvironment):
    async def step(self, message, key):
        self._results.clear()
        return await super().step(message, key)


class TakesAnyBody(ScriptedEnvironment):
    async def step(self, message, key):
        return self._results[key][1] if key in self._results else await super().step(message, key)


class IgnoresKeys(ScriptedEnvironment):
    async def step(self, message, key):
        for known, result in self._results.values():
            if known == message:
                return result
        return await super().step(message, key)


class NeverEnds(ScriptedEnvironment):
    async def step(self, message, key):
        return await super().step(message, key) if not self._state.ended else next(iter(self._results.values()))[1]


class EndsTwice(ScriptedEnvironment):
    async def step(self, message, key):
        result = await super().step(message, key)
        return msgspec.structs.replace(result, truncated=result.terminated)


class IgnoresSeed(ScriptedEnvironment):
    made = 0

    async def reset(self, task, seed):
        IgnoresSeed.made += 1
        return await super().reset(task, IgnoresSeed.made)


class SharesState(ScriptedEnvironment):
    shared = None

    @property
    def _state(self):
        return SharesState.shared

    @_state.setter
    def _state(self, state):
        SharesState.shared = state


class KeepsKeysOnRestore(ScriptedEnvironment):
    async def restore(self, snapshot_id):
        kept = dict(self._results)
        await super().restore(snapshot_id)
        self._results = kept


class ClonesItself(ScriptedEnvironment):
    async def clone(self):
        return self


class ClonesKeys(ScriptedEnvironment):
    async def clone(self):
        twin = await super().clone()
        twin._results = dict(self._results)
        return twin


class RaisesForMistakes(ScriptedEnvironment):
    async def step(self, message, key):
        if message.tool_calls and message.tool_calls[0].name != "add":
            raise KeyError(message.tool_calls[0].name)
        return await super().step(message, key)


class LosesMetadata(ScriptedEnvironment):
    async def step(self, message, key):
        return msgspec.structs.replace(await super().step(message, key), metadata={1: (2, 3)})


class ClosesOnce(ScriptedEnvironment):
    async def close(self):
        if self.closed:
            raise RuntimeError("already closed")
        self.closed = True


@pytest.mark.parametrize(
    ("make", "check", "message"),
    [
        (ForgetsKeys, "a_key_is_used_once", "a lost reply would act twice"),
        (TakesAnyBody, "a_key_belongs_to_one_message", "must raise"),
        (IgnoresKeys, "a_new_key_is_a_new_effect", "must act twice"),
        (NeverEnds, "the_script_ends_once", "after the end was accepted"),
        (EndsTwice, "the_script_ends_once", "terminated and truncated at once"),
        (IgnoresSeed, "same_seed_same_world", "same task and seed differ"),
        (SharesState, "sessions_share_nothing", "beside another session"),
        (KeepsKeysOnRestore, "snapshots_go_back", "after the first restore|still known after restore"),
        (ClonesItself, "clones_are_independent", "RuntimeError|EnvironmentFault|the clone's rest"),
        (ClonesKeys, "clones_are_independent", "knew a key of its original"),
        (RaisesForMistakes, "mistakes_of_the_model_are_answered", "no_such_tool"),
        (LosesMetadata, "everything_survives_the_wire", "not JSON-safe"),
        (ClosesOnce, "close_is_safe_twice", "second close raised"),
    ],
)
async def test_the_suite_finds_what_is_wrong(make, check, message):
    with pytest.raises(AssertionError, match=rf"{check}: .*({message})"):
        await run_suite({check: ENVIRONMENT_SUITE[check]}, counter(make))
