"""What a user's environment returns or raises wrongly is a fault that names it; it never breaks the worker."""

import re
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
import torch
from episode_kit import DONE, make_plan, play, says

import headrace
from headrace.actors.environments.adapter import as_async
from headrace.platform.records import (
    Budgets,
    Cost,
    HashPair,
    Message,
    Observation,
    RewardComponent,
    RewardKind,
    Role,
    StepResult,
    Task,
)
from headrace.platform.records.status import Status
from headrace.platform.testing.fakes.renderer import CharRenderer

GO = Observation((Message(Role.USER, "go"),))
END = StepResult(terminated=True)


class Whole:
    """The contract as a user may write it, plain or async."""

    name, version = "whole", "1"

    def __init__(self, tools=(), reset=GO, step=END):
        self.offered, self.first, self.then = tools, reset, step

    def tools(self):
        return self.offered

    def reset(self, task, seed):
        return self.first

    async def step(self, message, key):
        return self.then

    def close(self):
        """Nothing."""


class Derived(headrace.ReplayedEnvironment):
    """The same through the base."""

    name, version = "derived", "1"

    def __init__(self, tools=(), reset=GO, step=END):
        self.offered, self.first, self.then = tools, reset, step

    def tools(self):
        return self.offered

    def _reset(self, task, seed):
        return self.first

    async def _step(self, message):
        return self.then


@pytest.fixture
def executor():
    with ThreadPoolExecutor(4) as pool:
        yield pool


WRONG = [
    ({"reset": None}, "reset returned None; expected a headrace.Observation"),
    ({"reset": "go"}, "reset returned str; expected a headrace.Observation"),
    ({"reset": END}, "reset returned StepResult; expected a headrace.Observation"),
    ({"reset": Observation("go")}, "reset returned str as messages; expected a sequence of headrace.Message"),
    ({"reset": Observation(("go",))}, "reset returned str as an item of messages; expected a headrace.Message"),
    ({"reset": Observation((Message(Role.USER, None),))}, "returned None as the content of a message; expected text"),
    ({"step": None}, "step returned None; expected a headrace.StepResult"),
    ({"step": (GO, 1.0, True)}, "step returned tuple; expected a headrace.StepResult"),
    ({"step": StepResult(rewards=1.0)}, "step returned float as rewards; expected a sequence of headrace.Reward"),
    ({"step": StepResult(rewards=(1.0,))}, "returned float as an item of rewards; expected a headrace.RewardComponent"),
    (
        {"step": StepResult(rewards=(RewardComponent(RewardKind.OUTCOME, "1"),))},
        "returned str as the value of a reward; expected a number",
    ),
    ({"step": StepResult(status="FINE")}, "returned str as status; expected a Status: OK, MODEL_"),
    ({"step": StepResult(status=None)}, "returned None as status; expected a Status"),
    ({"step": StepResult(terminated="yes")}, "returned str as terminated; expected a bool"),
    ({"step": StepResult(cost=Cost(money="1"))}, "returned str as money of a Cost; expected a number"),
    ({"step": StepResult(metadata={"a": 2**70})}, "returned metadata that is not JSON"),
    ({"step": StepResult(metadata={"a": np.float64(1)})}, "returned metadata that is not JSON"),
    ({"reset": Observation((Message("usr", "go"),))}, "returned str as the role of a message; expected a Role: system"),
    ({"reset": Observation((Message(Role.USER, "go", tool_call_id=7),))}, "int as the tool_call_id of a message"),
    ({"reset": Observation(GO.messages, HashPair("a", 1))}, "returned HashPair as state_hash; expected a HashPair"),
    ({"step": StepResult(cost=2)}, "returned int as cost; expected a Cost"),
    (
        {"step": StepResult(state_hash="a")},
        "returned str as state_hash; expected a HashPair, such as headrace",
    ),
    ({"step": StepResult(metadata=[1])}, "returned list as metadata; expected a dict"),
    ({"step": StepResult(metadata={"a": object()})}, "returned metadata that is not JSON"),
]


# case X16: what metadata no hop can carry is refused where it was given
@pytest.mark.parametrize(("answers", "message"), WRONG)
@pytest.mark.parametrize("make", [Whole, Derived])
async def test_a_wrong_type_is_the_environments_fault(make, answers, message, executor):
    played = await play(as_async(make(**answers), executor), says(DONE))
    assert (played.score, played.episode.status, played.episode.fault_owner) == (None, Status.ENV_BUG, "environment")
    assert message in played.episode.fault
    assert played.episode.fault.startswith("EnvironmentFault: test_foreign_answers.py:")


# case E1: what is no finite number is told with its place
@pytest.mark.parametrize("value", [float("nan"), float("-inf"), np.float64("inf")])
@pytest.mark.parametrize("make", [Whole, Derived])
async def test_a_reward_that_is_not_finite_is_a_fault_that_names_it(make, value, executor):
    step = StepResult(rewards=(RewardComponent(RewardKind.OUTCOME, value),), terminated=True)
    played = await play(as_async(make(step=step), executor), says(DONE))
    assert (played.score, played.episode.status) == (None, Status.ENV_BUG)
    method = make.step if make is Whole else make._step
    told = rf"EnvironmentFault: test_foreign_answers\.py:{method.__code__.co_firstlineno}: {method.__qualname__} "
    assert re.match(told + rf"returned .*{value}.* as the value of a reward; expected a finite number", played.cause)


@pytest.mark.parametrize("make", [Whole, Derived])
async def test_scalars_and_names_become_plain(make, executor):
    step = StepResult(
        [Message("user", "on")],
        [RewardComponent("outcome", np.float64(0.5), np.bool_(True)), RewardComponent("cost", torch.tensor(0.25))],
        np.bool_(True),
        status="OK",
        cost=Cost(tool_calls=np.int64(1), money=np.float32(0.5)),
    )
    environment = as_async(make(step=step), executor)
    assert (await environment.reset(Task("t", "e"), 0)) == GO
    found = await environment.step(Message(Role.ASSISTANT, "x"), "key")
    assert found == StepResult(
        (Message(Role.USER, "on"),),
        (RewardComponent(RewardKind.OUTCOME, 0.5), RewardComponent(RewardKind.COST, 0.25)),
        True,
        cost=Cost(tool_calls=1, money=0.5),
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=StepResult) == found
    assert (type(found.status), type(found.messages[0].role), type(found.terminated)) == (Status, Role, bool)


async def test_wrong_tools_are_the_environments_fault(executor):
    for tools, message in ((None, "tools returned None; expected a sequence"), (["add"], "returned str as an item")):
        played = await play(as_async(Whole(tools), executor), says(DONE))
        assert message in played.episode.fault
        assert (played.episode.status, played.score) == (Status.ENV_BUG, None)


# case X16
async def test_metadata_survives_into_the_episode(executor):
    seen = {"board": [[1, None], ["x", 0.5]], "nested": {"a": True}}
    world = Whole(reset=Observation(GO.messages, metadata=seen), step=StepResult(GO.messages, metadata=seen))
    played = await play(as_async(world, executor), says(DONE), plan=make_plan(budgets=Budgets(max_turns=2)))
    opening, _, told, _, _ = played.episode.turns
    assert opening.metadata == told.metadata == seen


class Raising(Whole):
    """Raises where it is told to."""

    def __init__(self, where):
        super().__init__()
        self.where = where

    def tools(self):
        return self._maybe("tools", ())

    def reset(self, task, seed):
        return self._maybe("reset", GO)

    async def step(self, message, key):
        return self._maybe("step", self.then)

    def close(self):
        return self._maybe("close", None)

    def _maybe(self, where, answer):
        if where == self.where:
            raise KeyError(where)
        return answer


@pytest.mark.parametrize("where", ["tools", "reset", "step"])
async def test_what_is_raised_names_file_and_line(where, executor):
    line = Raising._maybe.__code__.co_firstlineno + 2
    played = await play(as_async(Raising(where), executor), says(DONE), CharRenderer())
    assert played.episode.fault == f"test_foreign_answers.py:{line} in _maybe: KeyError: '{where}'"
    assert (played.score, played.episode.status) == (None, Status.ENV_BUG)


async def test_a_close_that_raises_costs_nothing(executor):
    world = Raising("close")
    world.then = StepResult(rewards=(RewardComponent(RewardKind.OUTCOME, 0.5),), terminated=True)
    assert (await play(as_async(world, executor), says(DONE))).score == 0.5


def test_what_is_right_passes_unchanged():
    from headrace.actors.environments.answers import checked_observation, checked_step

    step = StepResult(GO.messages, state_hash=HashPair("a", "b"), metadata={"a": 1})
    assert checked_step(step, Whole.step) == step
    assert checked_observation(GO, Whole.reset) == GO
