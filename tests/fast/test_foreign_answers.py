"""What a user's environment returns or raises wrongly is a fault that names it; it never breaks the worker."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from episode_kit import DONE, make_plan, play, says

import headrace
from headrace.actors.environments.adapter import as_async
from headrace.platform.records import (
    Budgets,
    HashPair,
    Message,
    Observation,
    RewardComponent,
    RewardKind,
    Role,
    StepResult,
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
    ({"step": StepResult(status="OK")}, "returned str as status; expected a Status"),
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
        return self._maybe("step", END)

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
    assert (await play(as_async(Raising("close"), executor), says(DONE))).score == 0.0


def test_what_is_right_passes_unchanged():
    from headrace.actors.environments.answers import checked_observation, checked_step

    step = StepResult(GO.messages, state_hash=HashPair("a", "b"), metadata={"a": 1})
    assert checked_step(step, Whole.step) is step
    assert checked_observation(GO, Whole.reset) is GO
