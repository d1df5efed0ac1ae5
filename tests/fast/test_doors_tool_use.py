"""The second door: functions as tools. Mistakes go on, faults end the episode, and everything replays."""

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
from episode_kit import make_plan, play, says
from pydantic import BaseModel

import headrace
from headrace.actors.environments.adapter import as_async
from headrace.actors.environments.doors.tool_use import ToolUse
from headrace.actors.environments.kind import Origin
from headrace.actors.environments.registry import environment_kind
from headrace.actors.replay import replay_episode
from headrace.actors.scoring.process import ScorerProcess
from headrace.actors.worlds import Worlds
from headrace.platform.config.environments import EnvironmentConfig
from headrace.platform.errors import ConfigError, EnvironmentFault
from headrace.platform.records import Budgets, Message, Role, Status, Task, ToolCall
from headrace.platform.testing.conformance.environment import ENVIRONMENT_SUITE, EnvironmentContext
from headrace.platform.testing.fakes.renderer import CALL, END

TASK = Task("t", "shop", {"prompt": "Buy something.", "stock": {"apple": 2}})


def buy(item: str, session: headrace.Session, amount: int = 1) -> str:
    """Buy from the shop."""
    stock = session.task["stock"]
    if stock.get(item, 0) < amount:
        raise headrace.ToolError(f"there are only {stock.get(item, 0)} of {item}")
    stock[item] -= amount
    session.state["bought"] = session.state.get("bought", 0) + amount
    return f"{amount} {item}"


async def roll(session: headrace.Session) -> int:
    """Roll a die."""
    await asyncio.sleep(0)
    return session.random.randint(1, 10**9)


def divide(a: int, b: int) -> float:
    """Divide."""
    return a / b


def environment(*tools, **options):
    door = ToolUse(None, tools=list(tools or (buy, roll, divide)), reward=lambda completion: 0, **options)
    return door.environment_kind(Origin(target=f"{__file__}:Shop", file=None)).environment({})


def calls(*pairs):
    return Message(
        Role.ASSISTANT, tool_calls=tuple(ToolCall(name, args, f"c{n}") for n, (name, args) in enumerate(pairs))
    )


def says_in_words(text):
    return Message(Role.ASSISTANT, text)


async def after(message, *tools, task=TASK, **options):
    world = environment(*tools, **options)
    await world.reset(task, 0)
    return await world.step(message, "k")


SCRIPT = (
    calls(("buy", {"item": "apple"}), ("roll", {})),
    calls(("buy", {"item": "apple", "amount": 5})),
    says_in_words("done"),
)


@pytest.mark.parametrize("name", ENVIRONMENT_SUITE)
async def test_it_conforms(name):
    effect = calls(("roll", {}))
    await ENVIRONMENT_SUITE[name](EnvironmentContext(make=environment, task=TASK, script=SCRIPT, effect=effect))


async def test_calls_run_in_order_and_are_answered_by_id():
    result = await after(calls(("buy", {"item": "apple"}), ("divide", {"a": 1, "b": 4}), ("buy", {"item": "apple"})))
    assert [(m.role, m.tool_call_id, m.content) for m in result.messages] == [
        ("tool", "c0", "1 apple"),
        ("tool", "c1", "0.25"),
        ("tool", "c2", "1 apple"),
    ]
    assert (result.status, result.terminated, result.cost.tool_calls) == (Status.OK, False, 3)


async def test_a_message_without_calls_ends_it():
    result = await after(says_in_words("done"))
    assert (result.terminated, result.messages, result.status, result.rewards) == (True, (), Status.OK, ())


# case X1
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (("sell", {}), "error: there is no tool 'sell'; there is buy, roll, divide"),
        (("by", {}), "error: there is no tool 'by'; did you mean buy?"),
        (("divide", {"a": 1}), "error: divide(a: integer, b: integer): b is missing"),
        (("divide", {"a": 1, "b": "two"}), "b: input should be a valid integer"),
        (("divide", {"a": 1, "b": 2, "c": 3}), "there is no argument c"),
        (("divide", '{"a": 1, "b": 2}'), "the arguments must be a JSON object, not a string that holds JSON"),
        (("buy", {"item": "apple", "session": {}}), "there is no argument session"),
        (("buy", {"item": "pear"}), "error: there are only 0 of pear"),
    ],
)
async def test_mistakes_are_answered_and_the_episode_goes_on(call, message):
    result = await after(calls(call, ("divide", {"a": 4, "b": 2})))
    assert message in result.messages[0].content
    assert result.messages[1].content == "2.0"
    assert (result.status, result.terminated) == (Status.MODEL_INVALID_ACTION, False)


async def test_what_a_tool_raises_is_the_environments_fault():
    line = divide.__code__.co_firstlineno + 2
    with pytest.raises(EnvironmentFault) as caught:
        await after(calls(("divide", {"a": 1, "b": 0})))
    assert str(caught.value) == f"test_doors_tool_use.py:{line} in divide: ZeroDivisionError: division by zero"
    assert not caught.value.transient


@pytest.mark.parametrize(
    ("error", "transient"),
    [(ConnectionError("away"), True), (TimeoutError("slow"), True), (SystemExit(1), False), (StopIteration(), False)],
)
async def test_faults_are_transient_where_a_retry_may_help(error, transient):
    def fail() -> str:
        raise error

    with pytest.raises(EnvironmentFault) as caught:
        await after(calls(("fail", {})), fail)
    assert caught.value.transient is transient


async def test_a_tool_may_say_itself_that_its_fault_is_transient():
    def fail() -> str:
        raise headrace.EnvironmentFault("the shop is closed", transient=True)

    with pytest.raises(EnvironmentFault, match="the shop is closed") as caught:
        await after(calls(("fail", {})), fail)
    assert caught.value.transient


@dataclass
class Pair:
    left: int
    right: str


class Model(BaseModel):
    value: int


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is\n", "as it is\n"),
        (None, "ok"),
        (3, "3"),
        (True, "true"),
        (0.5, "0.5"),
        ({"b": 1, "a": [None, "é"]}, '{"a":[null,"é"],"b":1}'),
        ({"x", "y", "z"}, '["x","y","z"]'),
        (Pair(1, "r"), '{"left":1,"right":"r"}'),
        (Model(value=1), '{"value":1}'),
        (np.int64(3), "3"),
        (np.array([1, 2]), "[1,2]"),
        ("lone \ud800", "lone ?"),
    ],
)
async def test_results_are_text_or_json(value, text):
    def give() -> object:
        return value

    assert (await after(calls(("give", {})), give)).messages[0].content == text


async def test_a_result_that_is_no_json_names_the_tool():
    def give() -> object:
        return object()

    with pytest.raises(EnvironmentFault, match=r"^test_doors_.*\.py:\d+: give returned object, which is not JSON"):
        await after(calls(("give", {})), give)


@dataclass
class Found:
    score: float


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "returned float, which is not JSON: it is nan; return None"),
        ({"a": [1.0, float("-inf")]}, r"returned dict, .*: it\['a'\]\[1\] is -inf"),
        (np.array([1.0, np.nan]), r"returned ndarray, .*: it\[1\] is nan"),
        (Found(float("inf")), r"returned Found, .*: it\['score'\] is inf"),
        (b"raw", "returned bytes, which is not JSON: it is bytes; decode it"),
        ({"a": b"raw"}, r"it\['a'\] is bytes; decode it"),
        ({"a": {1: 2}}, r"it\['a'\] has the key 1, which is no text; use str\(key\)"),
        ({None: 2}, "has the key None"),
    ],
)
async def test_what_json_cannot_say_is_refused_and_not_rewritten(value, message):
    def give() -> object:
        return value

    line = give.__code__.co_firstlineno
    with pytest.raises(EnvironmentFault, match=message) as caught:
        await after(calls(("give", {})), give)
    assert str(caught.value).startswith(f"test_doors_tool_use.py:{line}: give returned ")
    assert not caught.value.transient


async def test_a_session_that_may_be_none_is_filled_in():
    def seed(session: headrace.Session | None = None) -> int:
        return session.seed

    assert (await after(calls(("seed", {})), seed)).messages[0].content == "0"


# case X13
async def test_sessions_share_neither_row_nor_state_nor_dice():
    one, two = environment(), environment()
    await one.reset(TASK, 0)
    await two.reset(TASK, 1)
    for _ in range(2):
        bought = await one.step(calls(("buy", {"item": "apple"})), str(_))
        assert bought.status is Status.OK
    other = await two.step(calls(("buy", {"item": "apple", "amount": 2})), "k")
    assert other.status is Status.OK
    assert TASK.data["stock"] == {"apple": 2}
    rolls = [(await world.step(calls(("roll", {})), "roll")).messages[0].content for world in (one, two)]
    assert rolls[0] != rolls[1]


async def test_the_state_hash_covers_row_calls_and_state():
    def remember(value: int, session: headrace.Session) -> None:
        session.state["value"] = value

    def hide(value: int, session: headrace.Session) -> None:
        session.state["value"] = {value}  # a set is no JSON: it is left out

    async def hashed(name, value, row=TASK):
        return (await after(calls((name, {"value": value})), remember, hide, task=row)).state_hash.canonical

    assert await hashed("remember", 1) == await hashed("remember", 1) != await hashed("remember", 2)
    assert await hashed("remember", 1) != await hashed("hide", 1)
    other = Task("u", "shop", {"prompt": "Another."})
    assert await hashed("remember", 1) != await hashed("remember", 1, other)


# case E11
async def test_plain_tools_of_many_sessions_block_at_the_same_time():
    together = threading.Barrier(32)

    def wait() -> str:
        together.wait(timeout=10)
        time.sleep(0.2)
        return "waited"

    async def one(executor):
        world = as_async(environment(wait), executor)
        await world.reset(TASK, 0)
        return (await world.step(calls(("wait", {})), "k")).messages[0].content

    began = time.monotonic()
    with ThreadPoolExecutor(64) as executor:
        assert await asyncio.gather(*(one(executor) for _ in range(32))) == ["waited"] * 32
    assert time.monotonic() - began < 5.0


def test_wrong_tools_are_refused():
    def reward(completion):
        return 0

    def untyped(a):
        return a

    for tools, message in (
        ([], "at least one function"),
        (divide, "at least one function"),
        ([divide, divide], "two tools are called 'divide'"),
        ([untyped], r"untyped: the parameter 'a' has no type"),
    ):
        with pytest.raises(ConfigError, match=message):
            ToolUse(None, tools=tools, reward=reward)


# --- from a file to a graded episode ----------------------------------------------------------------------------------

SHOP = """\
import headrace

def add(a: int, b: int) -> int:
    '''Add two numbers.

    Args:
        a: the first.
    '''
    return a + b

def fail(text: str) -> str:
    return {}[text]

def reward(completion: str, messages: list, answer: int) -> float:
    assert messages[0] == {"role": "system", "content": "Use add."}
    used = any(call["name"] == "add" for message in messages for call in message.get("tool_calls", []))
    return 0.5 * (completion == str(answer)) + 0.5 * used

Sums = headrace.ToolUse("sums.jsonl", tools=[add, fail], reward=reward, prompt="question", system="Use add.")
"""


@pytest.fixture
def target(tmp_path):
    rows = [{"question": f"{a}+1?", "a": a, "answer": a + 1} for a in range(40)]
    (tmp_path / "sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "sums.py").write_text(SHOP)
    return f"{tmp_path}/sums.py:Sums"


OPEN = []


async def played(target, *turns):
    worlds = Worlds([EnvironmentConfig(name=target)], "train", 0)
    OPEN.append(worlds.resources)
    kind, setting = environment_kind(target), worlds.setting(0)
    scorer = ScorerProcess(kind.scorer.kind, kind.scorer.args)
    row = setting.task.data
    try:
        plan = make_plan(setting.task, seed=setting.seed, budgets=Budgets(8, 4096, 60.0))
        script = [[*turn(row), END] for turn in turns]
        done = await play(worlds.async_environment(setting.config), says(*script), plan=plan, scorer=scorer)
        return done, worlds.async_environment(setting.config)
    finally:
        await scorer.close()


@pytest.fixture(autouse=True)
async def resources():
    """What the worlds of a test stand on, closed after it."""
    yield
    while OPEN:
        await OPEN.pop().close()


def call(name, **arguments):
    return [CALL, *json.dumps({"name": name, "arguments": arguments}).encode()]


async def test_an_episode_is_played_graded_and_replayed(target):
    done, again = await played(
        target,
        lambda row: call("add", a=row["a"]),
        lambda row: [*call("add", a=row["a"], b=1), *call("add", a=1, b=1)],
        lambda row: str(row["answer"]).encode(),
    )
    assert (done.score, done.episode.status) == (1.0, Status.OK)
    told = [turn.content for turn in done.episode.turns if turn.role is Role.TOOL]
    assert told[0] == "error: add(a: integer, b: integer): b is missing"
    assert told[1] == f"{done.episode.task.data['answer']}\n2"
    assert done.episode.cost.tool_calls == 2
    report = await replay_episode(done.episode, again)
    assert (report.equal, report.steps) == (True, 3)


async def test_a_broken_tool_is_a_fault_with_its_file_and_line(target):
    done, _ = await played(target, lambda row: call("fail", text="x"))
    assert (done.score, done.episode.status, done.episode.fault_owner) == (None, Status.ENV_BUG, "environment")
    assert done.episode.fault == "EnvironmentFault: sums.py:12 in fail: KeyError: 'x'"


def test_the_version_follows_the_file(target, tmp_path):
    before = environment_kind(target)
    copy = tmp_path / "other"
    copy.mkdir()
    (copy / "sums.py").write_text(SHOP.replace("a + b", "a + b + 0"))
    after = environment_kind(f"{copy}/sums.py:Sums")
    assert before.digest != after.digest
    assert before.environment({}).version != after.environment({}).version
    assert [tool.name for tool in before.environment({}).tools()] == ["add", "fail"]
