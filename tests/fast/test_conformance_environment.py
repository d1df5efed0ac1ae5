import asyncio
import dataclasses
import random

import msgspec
import pytest

from headrace.platform.records import Message, Role, Status, Task, ToolCall
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


class Kin(ScriptedEnvironment):
    """Its clones are what it is."""

    async def clone(self):
        twin = type(self)()
        twin._state = self._present()
        return twin


class EndsTwice(Kin):
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
        (EndsTwice, "terminated_is_not_truncated", "terminated and truncated at once"),
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


class AnswersFaults(Kin):
    async def step(self, message, key):
        result = await super().step(message, key)
        return msgspec.structs.replace(result, status=Status.ENV_TRANSIENT) if result.terminated else result


class TerminatesAtLimits(Kin):
    async def step(self, message, key):
        result = await super().step(message, key)
        return msgspec.structs.replace(result, status=Status.BUDGET_EXHAUSTED) if result.terminated else result


class LeavesSomething(Kin):
    """Whoever begins after a session was closed sees it."""

    left = 0

    async def reset(self, task, seed):
        observation = await super().reset(task, seed)
        return msgspec.structs.replace(observation, metadata={"left": LeavesSomething.left})

    async def close(self):
        if not self.closed:
            LeavesSomething.left += 1
        await super().close()


class ForgetsDice(Kin):
    """Draws in its first step, from dice that no snapshot holds."""

    async def reset(self, task, seed):
        self.dice = random.Random(seed)
        return await super().reset(task, seed)

    async def step(self, message, key):
        is_new, first = key not in self._results, self._state is not None and self._state.steps == 0
        result = await super().step(message, key)
        if is_new and first:
            result = msgspec.structs.replace(result, metadata={"drawn": self.dice.random()})
            self._results[key] = (message, result)
        return result

    async def clone(self):
        twin = await super().clone()
        twin.dice = random.Random()
        twin.dice.setstate(self.dice.getstate())
        return twin


class StaysBusy(Kin):
    """A cancelled step leaves it locked."""

    busy = False

    async def step(self, message, key):
        self.busy = True
        await asyncio.sleep(0)
        try:
            return await super().step(message, key)
        finally:
            self.busy = False

    async def close(self):
        if self.busy:
            raise RuntimeError("a step is on its way")
        await super().close()


class IgnoresCancellation(Kin):
    async def reset(self, task, seed):
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            await asyncio.sleep(0.5)
        return await super().reset(task, seed)


class SlowSnapshot(Kin):
    async def snapshot(self):
        await asyncio.sleep(0.3)
        return await super().snapshot()


@pytest.mark.parametrize(
    ("make", "check", "message"),
    [
        (EndsTwice, "terminated_is_not_truncated", "step 2 is terminated and truncated at once"),
        (AnswersFaults, "terminated_is_not_truncated", "step 2 answered ENV_TRANSIENT; a fault is raised"),
        (TerminatesAtLimits, "terminated_is_not_truncated", "what a limit ended is truncated"),
        (LeavesSomething, "a_replay_is_equal", "a replay differs first at reset, in its result"),
        (ForgetsDice, "snapshots_keep_the_random_state", "after a restore to step 0 what comes next is different"),
        (StaysBusy, "calls_end_in_time", "a step is on its way"),
        (IgnoresCancellation, "calls_end_in_time", "reset was cancelled and has not ended within 0.2 s"),
        (SlowSnapshot, "calls_end_in_time", "snapshot gave no answer within 0.2 s"),
    ],
)
async def test_what_one_check_is_for_no_other_finds(make, check, message):  # cases X4, X15, P26
    context = dataclasses.replace(counter(make), deadline_s=0.2)
    with pytest.raises(
        AssertionError, match=rf"1 of {len(ENVIRONMENT_SUITE)} checks do not hold:\n{check}: .*{message}"
    ):
        await run_suite(ENVIRONMENT_SUITE, context)


async def test_times_and_raw_hashes_may_differ_between_two_runs_of_an_episode():
    """What a replay passes over, the suite does too."""
    made = iter(range(10**6))

    class Timed(Kin):
        async def step(self, message, key):
            if key in self._results:
                return self._results[key][1]
            result = await super().step(message, key)
            said = f"at 12:30:{next(made) % 60:02d} by pid {next(made)}"
            raw = msgspec.structs.replace(result.state_hash, raw=f"{next(made)}")
            cost = msgspec.structs.replace(result.cost, tool_s=next(made) / 8)
            result = msgspec.structs.replace(result, metadata={"log": said}, state_hash=raw, cost=cost)
            self._results[key] = (message, result)
            return result

    suite = {name: check for name, check in ENVIRONMENT_SUITE.items() if name != "a_key_belongs_to_one_message"}
    await run_suite(suite, counter(Timed))
