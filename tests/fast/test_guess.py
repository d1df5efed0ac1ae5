"""The guessing world and its tasks."""

import pytest

from headrace.actors.environments.guess import HIGHEST, GuessEnvironment, GuessTasks
from headrace.actors.environments.registry import environment_kind
from headrace.platform.errors import ConfigError
from headrace.platform.records import Message, Role, Status, ToolCall
from headrace.platform.records.message import Task
from headrace.platform.testing.conformance.environment import ENVIRONMENT_SUITE, EnvironmentContext
from headrace.platform.testing.conformance.tasks import TASK_SUITE, TaskContext

TASK_SPLITS = ("train", "dev", "hidden")
TASK = Task("guess-1", "guess", data={"number": 40}, seed=3)


def say(text):
    return Message(Role.ASSISTANT, text)


async def played(*answers, turns=2):
    environment = GuessEnvironment(turns)
    await environment.reset(TASK, 0)
    return [await environment.step(say(text), str(turn)) for turn, text in enumerate(answers)]


@pytest.mark.parametrize("name", ENVIRONMENT_SUITE)
async def test_the_environment_conforms(name):
    script = [say("50"), say("no idea"), say("20"), say("40")]
    await ENVIRONMENT_SUITE[name](
        EnvironmentContext(make=lambda: GuessEnvironment(5), task=TASK, script=script, effect=say("30"))
    )


@pytest.mark.parametrize("name", TASK_SUITE)
@pytest.mark.parametrize("seed", [0, 1])
async def test_the_tasks_conform(name, seed):
    await TASK_SUITE[name](TaskContext(make=lambda split: GuessTasks(split, seed)))


@pytest.mark.parametrize(
    ("first", "second", "reward"),
    [("50", "30", 0.9), ("40", None, 1.0), ("50", "40", 1.0), ("100", "90", 0.5), ("x", "39", 0.99), ("x", "y", 0.0)],
)
async def test_the_best_guess_is_rewarded(first, second, reward):
    *before, last = await played(*(text for text in (first, second) if text is not None))
    assert last.terminated
    assert [component.value for component in last.rewards] == [pytest.approx(reward)]
    assert all(not result.terminated and not result.rewards for result in before)


@pytest.mark.parametrize(
    ("said", "answer"),
    [("50", "lower"), ("I guess 12.", "higher"), ("from 1 to 100, 70", "lower"), ("5 of 900", "higher")],
)
async def test_a_wrong_guess_is_answered(said, answer):
    (result,) = await played(said)
    assert (result.messages, result.status) == ((Message(Role.USER, f"It is {answer}."),), Status.OK)


# case E3
@pytest.mark.parametrize("said", ["", "forty", "0", "101", "4040", "9" * 5000, "-", "٤٠"])
async def test_an_answer_without_a_number_is_a_turn_that_was_lost(said):
    first, second = await played(said, said)
    assert first.status is second.status is Status.MODEL_INVALID_ACTION
    assert "in digits, such as 50" in first.messages[0].content
    assert (first.terminated, second.terminated, second.rewards[0].value) == (False, True, 0.0)


async def test_a_tool_call_is_no_number():
    environment = GuessEnvironment()
    assert environment.tools() == ()
    await environment.reset(TASK, 0)
    result = await environment.step(Message(Role.ASSISTANT, tool_calls=(ToolCall("guess", {"number": 40}),)), "0")
    assert result.status is Status.MODEL_INVALID_ACTION


async def test_the_opening_tells_the_rules_and_not_the_number():
    observation = await GuessEnvironment(3).reset(TASK, 0)
    (message,) = observation.messages
    assert (message.role, "3 turns" in message.content, "40" in message.content) == (Role.USER, True, False)


# case V2
def test_no_number_of_one_split_is_in_another():
    numbers = {split: {task.data["number"] for task in GuessTasks(split, 0).next(2000)} for split in TASK_SPLITS}
    assert [len(each) for each in numbers.values()] == [80, 10, 10]
    assert set.union(*numbers.values()) == set(range(1, HIGHEST + 1))
    seeds = [task.seed for split in TASK_SPLITS for task in GuessTasks(split, 0).next(100)]
    assert len(set(seeds)) == 300
    assert [task.data for task in GuessTasks("train", 1).next(20)] != [t.data for t in GuessTasks("train", 0).next(20)]


def test_settings_are_checked():
    kind = environment_kind("guess")
    with pytest.raises(ConfigError, match="turns must be at least 1"):
        kind.environment({"turns": 0})
    with pytest.raises(ConfigError, match="did you mean 'turns'"):
        kind.environment({"turn": 3})
    with pytest.raises(ConfigError, match="no split 'test'"):
        GuessTasks("test", 0)
