"""The client for OpenEnv servers, against one that answers as each test says."""

import contextlib
import http

import pytest
from remote_kit import say
from websockets.asyncio.server import serve
from websockets.datastructures import Headers
from websockets.http11 import Response

from headrace import Role, Status, Task
from headrace.actors.remote.group_version import GroupVersion
from headrace.actors.remote.openenv_kind import OPENENV, OpenEnvTasks
from headrace.actors.remote.pools import EnvironmentPool
from headrace.actors.remote.protocol import Said, decode, encode
from headrace.platform.config.pools import PoolConfig
from headrace.platform.errors import ConfigError, EnvironmentFault, HostAway, InfrastructureFault
from headrace.platform.records.message import ToolCall

TASK = Task("t", "openenv", data={"seed": 9, "level": "hard"})


def observed(reward=None, done=False, **fields):
    return {"type": "observation", "data": {"observation": fields, "reward": reward, "done": done}}


def error(code, message="no", **more):
    return {"type": "error", "data": {"message": message, "code": code, **more}}


@contextlib.asynccontextmanager
async def played(answers, form=None, wait_s=2.0, metadata=b'{"name": "e", "version": "3"}'):
    """A session on a server that gives `answers` in order, and the list of what it was sent."""
    asked = []

    async def play(connection):
        async for raw in connection:
            said = decode(raw)
            if said.type == "close":
                return
            asked.append((said.type, said.data))
            if not answers:
                connection.transport.abort()
                return
            await connection.send(encode(answers.pop(0)), text=True)

    def page(connection, request):
        if request.path != "/metadata":
            return None
        status = http.HTTPStatus.OK if metadata else http.HTTPStatus.NOT_FOUND
        headers = Headers({"Content-Length": str(len(metadata)), "Connection": "close"})
        return Response(status, status.phrase, headers, metadata)

    async with serve(play, "127.0.0.1", 0, process_request=page) as server:
        address = f"ws://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"
        pool = EnvironmentPool(PoolConfig(hosts=(address,), protocol="openenv"), "openenv", "", form)
        session = pool.session(GroupVersion(), wait_s)
        try:
            yield session, asked
        finally:
            await session.close()
            await pool.close()


async def test_a_task_is_what_reset_is_given():
    form = {"reset": {"level": "easy", "size": 3}, "system": "be brief", "prompt": "you see {observation}."}
    async with played([observed(a=1, b="two")], form) as (session, asked):
        opening = await session.reset(TASK, 2**40)
        assert asked == [("reset", {"seed": 9, "level": "hard", "size": 3})]
        assert [(each.role, each.content) for each in opening.messages] == [
            (Role.SYSTEM, "be brief"),
            (Role.USER, 'you see {"a": 1, "b": "two"}.'),
        ]
        assert session.version == "3"
    async with played([observed(a=1)], {"version": "own"}, metadata=b"") as (session, asked):
        await session.reset(Task("t", "openenv"), 2**31 + 5)
        assert asked == [("reset", {"seed": 5})]
        assert session.version == "own"


async def test_several_calls_are_several_steps_and_the_first_end_is_the_last():
    answers = [observed(x="0"), observed(0.25, x="one"), observed(True, True, x="two"), observed(x="never")]
    form = {"observation_field": "x", "action_field": "", "tool_field": "kind", "action": {"v": 1}}
    form["tools"] = [{"name": "go"}, {"name": "stop"}]
    calls = [ToolCall("go", {"n": 1}, "a"), ToolCall("stop", {"kind": "fake"}, "b"), ToolCall("go", {}, "c")]
    async with played(answers, form) as (session, asked):
        await session.reset(TASK, 1)
        result = await session.step(say("", *calls), "k")
        assert asked[1:] == [("step", {"n": 1, "v": 1, "kind": "go"}), ("step", {"kind": "stop", "v": 1})]
        assert [(each.content, each.tool_call_id) for each in result.messages] == [("one", "a"), ("two", "b")]
        assert ([each.value for each in result.rewards], result.terminated) == ([0.25, 1.0], True)
        assert result.cost.tool_calls == 3


async def test_words_where_a_tool_is_wanted_are_the_models_mistake():
    form = {"action_field": "", "tools": [{"name": "go"}]}
    async with played([observed(x="0")], form) as (session, asked):
        await session.reset(TASK, 1)
        result = await session.step(say("hello"), "k")
        assert (result.status, result.messages[0].content) == (
            Status.MODEL_INVALID_ACTION,
            "call one of these tools: go",
        )
        assert len(asked) == 1


@pytest.mark.parametrize(
    ("answers", "cls", "told"),
    [
        ([observed(x="0", done=True)], EnvironmentFault, "done at reset"),
        ([error("EXECUTION_ERROR", "broken")], EnvironmentFault, "broken"),
        ([error("CAPACITY_REACHED", "1 of 1")] * 99, HostAway, "no host took a session.*1 of 1"),
        ([error("SESSION_ERROR", "lost")], HostAway, "lost"),
        ([{"type": "observation", "data": {"observation": "text"}}], HostAway, "speaks otherwise"),
        ([{"type": "mcp", "data": {}}], HostAway, "not asked for"),
        ([], HostAway, "connection is lost in a reset"),
    ],
)
async def test_what_goes_wrong_at_reset(answers, cls, told):
    async with played([dict(each) for each in answers], wait_s=1.0) as (session, _):
        with pytest.raises(cls, match=told):
            await session.reset(TASK, 1)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"reward": 1.0, "done": "false"}, "done is 'false'; expected true or false"),
        ({"done": None}, "done is None"),
        ({"done": 0}, "done is 0"),
        ({"done": "x" * 9999}, "done is 'xxx"),
        ({"reward": float("nan"), "done": True}, "reward is nan; expected a finite number"),
        ({"reward": 10**400, "done": True}, "reward is 1000"),
        ({"reward": "1"}, "reward is '1'"),
    ],
)
async def test_fields_of_another_type_are_the_environments_fault(fields, told):
    async with played([observed(x="0")]) as (session, _):
        await session.reset(TASK, 1)
        said = {"type": "observation", "data": {"observation": {"x": "1"}, **fields}}
        place = session._place
        with pytest.raises(EnvironmentFault, match=told) as found:
            session._parts(Said(**said), place)
        assert not isinstance(found.value, InfrastructureFault)
        assert found.value.transient is False
        assert len(str(found.value)) < 200
        del said["data"]["observation"]
        with pytest.raises(HostAway, match="speaks otherwise"):
            session._parts(Said(**said), place)


@pytest.mark.parametrize(
    ("errors", "told"),
    [
        (["too loud"], "too loud"),
        ("too loud", "too loud"),
        ({"loc": 3, "msg": "too loud"}, "3: too loud"),
        ([{"loc": None}, 7, None], "None: ; 7; None"),
        ([], "no"),
        (["x" * 10**6], "x" * 4000),
    ],
)
async def test_complaints_of_any_form_are_told_to_the_model(errors, told):
    async with played([observed(x="0"), error("VALIDATION_ERROR", errors=errors)]) as (session, _):
        await session.reset(TASK, 1)
        result = await session.step(say("a"), "k")
        assert (result.status, result.messages[0].content) == (Status.MODEL_INVALID_ACTION, told)


async def test_a_group_does_not_mix_what_one_address_has_played():  # P17
    versions = ["7"]

    async def play(connection):
        async for raw in connection:
            if decode(raw).type == "close":
                return
            await connection.send(encode(observed(text=f"server {versions[-1]}")), text=True)

    def page(connection, request):
        if request.path != "/metadata":
            return None
        body = encode({"version": versions[-1]})
        return Response(200, "OK", Headers({"Content-Length": str(len(body)), "Connection": "close"}), body)

    server = await serve(play, "127.0.0.1", 0, process_request=page)
    port = next(iter(server.sockets)).getsockname()[1]
    config = PoolConfig(hosts=(f"ws://127.0.0.1:{port}",), protocol="openenv")
    pool = EnvironmentPool(config, "openenv", "", {"observation_field": "text"})
    group = GroupVersion()
    first, second, other = pool.session(group, 2.0), pool.session(group, 2.0), pool.session(GroupVersion(), 2.0)
    assert (await first.reset(TASK, 1)).messages[0].content == "server 7"
    await first.close()
    server.close()
    await server.wait_closed()
    versions.append("8")
    server = await serve(play, "127.0.0.1", port, process_request=page)
    with pytest.raises(HostAway, match="played in version 7, and no host has it"):
        await second.reset(TASK, 1)
    assert (await other.reset(TASK, 1)).messages[0].content == "server 8"
    assert (first.version, other.version) == ("7", "8")
    for each in (second, other):
        await each.close()
    await pool.close()
    server.close()
    await server.wait_closed()


async def test_a_server_that_goes_away_in_mid_episode():
    async with played([observed(x="0")]) as (session, _):
        await session.reset(TASK, 1)
        with pytest.raises(HostAway, match="connection is lost in a step"):
            await session.step(say("a"), "k")


def test_the_kind_says_where_it_is_played():
    environment = OPENENV.environment({"version": "2"})
    assert (environment.name, environment.version) == ("openenv", "2")
    with pytest.raises(EnvironmentFault, match="protocol: openenv") as found:
        environment.reset(TASK, 1)
    assert found.value.transient is False
    with pytest.raises(ConfigError, match="tools"):
        OPENENV.environment({"tools": [{"nam": "x"}]})


def test_tasks_are_seeds_that_splits_do_not_share():  # case V2
    drawn = [
        {task.data["seed"] for task in OPENENV.tasks(split, 3, {}).next(500)} for split in ("train", "dev", "hidden")
    ]
    assert len(set.union(*drawn)) == sum(map(len, drawn))
    assert all(0 <= seed < 2**31 for seeds in drawn for seed in seeds)
    source = OpenEnvTasks("train", 3)
    first = source.next(5)
    source.restore(2)
    assert (source.next(1)[0], source.state) == (first[2], 3)
    with pytest.raises(ConfigError, match="no split"):
        OpenEnvTasks("test", 0)
