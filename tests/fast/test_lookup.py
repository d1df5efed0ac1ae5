"""The lookup world, its tasks and its demonstrators."""

from collections import Counter
from itertools import islice

import pytest
from episode_kit import lookup_renderer, lookup_task

from headrace.actors.environments.lookup import LookupEnvironment, LookupTasks, demonstrations
from headrace.actors.environments.lookup.tasks import split_of
from headrace.actors.environments.registry import environment_kind
from headrace.platform.errors import ConfigError, NotFound
from headrace.platform.records import Message, Role, Status, ToolCall
from headrace.platform.testing.conformance.environment import ENVIRONMENT_SUITE, EnvironmentContext
from headrace.platform.testing.conformance.tasks import TASK_SUITE, TaskContext

TASK = lookup_task(hops=(2,))
FIRST, SECOND = TASK.data["chain"]
ANSWER = TASK.data["answer"]


def get(key, name="get"):
    return Message(Role.ASSISTANT, tool_calls=(ToolCall(name, {"key": key}, "call_0"),))


def context():
    script = [get(FIRST), get(SECOND), Message(Role.ASSISTANT, ANSWER)]
    return EnvironmentContext(make=LookupEnvironment, task=TASK, script=script, effect=get(FIRST))


@pytest.mark.parametrize("name", ENVIRONMENT_SUITE)
async def test_the_environment_conforms(name):
    await ENVIRONMENT_SUITE[name](context())


@pytest.mark.parametrize("name", TASK_SUITE)
@pytest.mark.parametrize("seed", [0, 1])
async def test_the_tasks_conform(name, seed):
    await TASK_SUITE[name](TaskContext(make=lambda split: LookupTasks(split, seed)))


async def begun():
    environment = LookupEnvironment()
    observation = await environment.reset(TASK, 1)
    assert observation.messages[0].content == f"find {FIRST}"
    return environment


async def test_a_chain_is_followed_to_its_value():
    environment = await begun()
    assert (await environment.step(get(FIRST), "0")).messages[0].content == f"{FIRST}=@{SECOND}"
    assert (await environment.step(get(SECOND), "1")).messages[0].content == f"{SECOND}={ANSWER}"
    result = await environment.step(Message(Role.ASSISTANT, ANSWER), "2")
    assert (result.rewards[0].value, result.terminated) == (1.0, True)


# cases E3, E4
@pytest.mark.parametrize("said", ["", f"{ANSWER} ", f"it is {ANSWER}", ANSWER * 2, FIRST, "v"])
async def test_anything_but_the_value_is_wrong(said):
    environment = await begun()
    await environment.step(get(SECOND), "0")
    result = await environment.step(Message(Role.ASSISTANT, said), "1")
    assert (result.rewards[0].value, result.terminated) == (0.0, True)


@pytest.mark.parametrize("call", [get("k99"), get(""), get(FIRST, "put"), get(7), get(None)])
async def test_a_read_of_nothing_is_answered(call):
    result = await (await begun()).step(call, "0")
    assert (result.messages[0].content, result.status, result.terminated) == ("?", Status.MODEL_INVALID_ACTION, False)


async def test_several_reads_in_one_turn_are_answered_in_order():
    message = Message(
        Role.ASSISTANT,
        tool_calls=tuple(ToolCall("get", {"key": key}, f"call_{n}") for n, key in enumerate((SECOND, "k99", FIRST))),
    )
    result = await (await begun()).step(message, "0")
    assert [(m.content, m.tool_call_id) for m in result.messages] == [
        (f"{SECOND}={ANSWER}", "call_0"),
        ("?", "call_1"),
        (f"{FIRST}=@{SECOND}", "call_2"),
    ]
    assert (result.cost.tool_calls, result.status) == (3, Status.MODEL_INVALID_ACTION)


async def test_the_state_says_what_was_read_and_said():
    environment = await begun()
    hashes = [(await environment.step(get(FIRST), str(n))).state_hash for n in range(3)]
    hashes.append((await environment.step(Message(Role.ASSISTANT, "v00"), "end")).state_hash)
    assert len(set(hashes)) == 4


async def test_latency_changes_time_and_nothing_else():
    slow, fast = LookupEnvironment(latency_s=0.001), LookupEnvironment()
    for environment in (slow, fast):
        await environment.reset(TASK, 3)
    assert await slow.step(get(FIRST), "0") == await fast.step(get(FIRST), "0")
    twin = await slow.clone()
    message = Message(Role.ASSISTANT, ANSWER)
    assert await twin.step(message, "1") == await fast.step(message, "1")


def test_settings_are_checked():
    with pytest.raises(ConfigError, match="latency_s must be at least 0"):
        LookupEnvironment(latency_s=-1)
    with pytest.raises(ConfigError, match="no split 'test'"):
        LookupTasks("test", 0)
    for hops in ([], [0], [33]):
        with pytest.raises(ConfigError, match="hops must be"):
            LookupTasks("train", 0, hops)
    kind = environment_kind("lookup")
    with pytest.raises(ConfigError, match="did you mean 'latency_s'"):
        kind.environment({"latency": 1})
    with pytest.raises(ConfigError, match="did you mean 'hops'"):
        kind.tasks("train", 0, {"hop": [1]})
    with pytest.raises(NotFound, match="did you mean 'lookup'"):
        environment_kind("lokup")


# case V2
def test_no_task_of_one_split_is_in_another():
    pairs = {
        split: {(t.data["chain"][0], t.data["answer"]) for t in LookupTasks(split, 0).next(500)}
        for split in ("train", "dev", "hidden")
    }
    assert not pairs["train"] & pairs["dev"]
    assert not pairs["train"] & pairs["hidden"]
    assert not pairs["dev"] & pairs["hidden"]
    assert all(split_of(key, value) == split for split, each in pairs.items() for key, value in each)


def test_a_chain_never_meets_itself():
    for task in LookupTasks("train", 1, hops=(1, 2, 32)).next(60):
        assert len(set(task.data["chain"])) == len(task.data["chain"])


def test_tasks_have_their_own_seeds_and_depend_on_the_runs():
    tasks = LookupTasks("train", 0).next(200)
    assert len({task.seed for task in tasks}) == 200
    assert all(task.seed > 0 for task in tasks)
    assert [t.data for t in LookupTasks("train", 1).next(20)] != [t.data for t in tasks[:20]]
    lengths = Counter(len(task.data["chain"]) for task in tasks)
    assert set(lengths) == {1, 2}
    assert min(lengths.values()) > 50


async def solved(renderer, token_ids, mask, task):
    """Whether the turns that the mask marks solve the task, read as an episode reads them."""
    environment = LookupEnvironment()
    await environment.reset(task, 0)
    turns, run = [], []
    for token, sampled in zip([*token_ids, 0], [*mask, 0], strict=True):
        if sampled:
            run.append(token)
        elif run:
            turns.append(run)
            run = []
    for number, ids in enumerate(turns):
        said = renderer.parse(ids)
        assert not said.error
        result = await environment.step(Message(Role.ASSISTANT, said.content, tool_calls=said.tool_calls), str(number))
    assert result.terminated
    return result.rewards[0].value


async def test_the_oracle_solves_every_task_and_the_guesser_does_not(tmp_path):
    renderer, tasks = lookup_renderer(tmp_path), LookupTasks("train", 2).next(40)
    scores = {}
    for share in (0.0, 1.0):
        traces = islice(demonstrations(renderer, LookupTasks("train", 2), share, 9), 40)
        scores[share] = [await solved(renderer, ids, mask, t) for (ids, mask), t in zip(traces, tasks, strict=True)]
    assert scores[0.0] == [1.0] * 40
    assert sum(scores[1.0]) < 6


def test_demonstrations_are_repeatable_and_end_with_the_end_token(tmp_path):
    renderer = lookup_renderer(tmp_path)
    one, two = (list(islice(demonstrations(renderer, LookupTasks("train", 2), 0.5, 9), 20)) for _ in range(2))
    assert one == two
    for token_ids, mask in one:
        assert len(token_ids) == len(mask)
        assert (token_ids[-1], mask[-1], mask[0]) == (renderer.stop_token_ids[0], 1, 0)
