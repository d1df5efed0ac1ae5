"""Both ways: our client on a stock OpenEnv server, and OpenEnv's own client on our host. Each server is a process."""

import asyncio
import json
import subprocess
import sys
import time

import pytest
from command_line import environment, start
from openenv_server import serving

from headrace import Message, Role, Status
from headrace.actors.remote.group_version import GroupVersion
from headrace.actors.remote.openenv_kind import OpenEnvTasks
from headrace.actors.remote.pools import EnvironmentPool
from headrace.platform.config.pools import PoolConfig
from headrace.platform.errors import EnvironmentFault, HostAway
from headrace.platform.records.message import ToolCall
from headrace.platform.records.status import RewardKind

FORM = {"observation_field": "word", "prompt": "say {observation}"}
CALLS = {
    **FORM,
    "action_field": "",
    "tools": [{"name": "say", "parameters": {"type": "object", "properties": {"message": {"type": "string"}}}}],
}
(TASK, *_) = OpenEnvTasks("train", 0).next(1)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("openenv"), capacity=2) as address:
        yield address


def said(text, *calls):
    return Message(Role.ASSISTANT, text, tool_calls=calls)


def pool_of(server, form=FORM):
    return EnvironmentPool(PoolConfig(hosts=(server,), protocol="openenv"), "openenv", "", form)


async def test_a_stock_server_is_played(server):
    pool = pool_of(server)
    session = pool.session(GroupVersion(), 20.0)
    opening = await session.reset(TASK, TASK.seed)
    word = opening.messages[0].content.removeprefix("say ")
    assert opening.messages[0].role is Role.USER
    assert set(word) <= set("abcd")
    assert opening.metadata == {"turn": 0}
    assert (session.name, session.version, session.provenance.pool) == ("openenv", "0.7", server)
    result = await session.step(said(word), "k")
    assert (result.terminated, result.truncated, result.status) == (True, False, Status.OK)
    assert [(each.kind, each.value) for each in result.rewards] == [(RewardKind.OUTCOME, 1.0)]
    assert result.metadata == {"turn": 1}
    assert await session.step(said(word), "k") == result  # P25: from the client's own table
    with pytest.raises(EnvironmentFault, match="another message"):
        await session.step(said("x"), "k")
    with pytest.raises(EnvironmentFault, match="after the end"):
        await session.step(said("x"), "k2")
    again = await session.reset(TASK, TASK.seed)
    assert again == opening  # the same seed, the same world and hash
    assert (await session.step(said("ab" + word), "k")).rewards[0].value < 1.0
    await session.close()
    await pool.close()


async def test_tools_become_actions_and_wrong_ones_are_the_models_mistake(server):
    pool = pool_of(server, CALLS)
    session = pool.session(GroupVersion(), 20.0)
    word = (await session.reset(TASK, 0)).messages[0].content.removeprefix("say ")
    assert [tool.name for tool in session.tools()] == ["say"]
    for wrong in (
        said("words"),
        said("", ToolCall("say", {"massage": "x"}, "c0")),
        said("", ToolCall("say", {}, "c0")),
    ):
        result = await session.step(wrong, f"k{wrong}")
        assert (result.status, result.terminated, result.rewards) == (Status.MODEL_INVALID_ACTION, False, ())
        assert result.messages[0].content
    result = await session.step(said("", ToolCall("say", {"message": word}, "c1")), "right")
    assert (result.rewards[0].value, result.messages[0].tool_call_id) == (1.0, "c1")
    await session.close()
    await pool.close()


async def test_a_form_that_does_not_fit_is_not_the_models_mistake(server):
    for form, told in (
        ({"observation_field": "wrod"}, "observation_field 'wrod' is not among word, turn"),
        ({**FORM, "action_field": "text"}, "action_field or action does not fit"),
    ):
        pool = pool_of(server, form)
        session = pool.session(GroupVersion(), 20.0)
        with pytest.raises(EnvironmentFault, match=told) as found:
            await session.reset(TASK, 0)
            await session.step(said("x"), "k")
        assert found.value.transient is False
        await session.close()
        await pool.close()


async def test_what_the_server_raises_is_the_environments_fault(server):
    pool = pool_of(server)
    session = pool.session(GroupVersion(), 20.0)
    await session.reset(TASK, 0)
    with pytest.raises(EnvironmentFault, match="the world broke") as found:
        await session.step(said("raise"), "k")
    assert found.value.transient is False
    await session.close()
    await pool.close()


async def test_a_full_server_is_waited_for(server):
    pool = pool_of(server)
    sessions = [pool.session(GroupVersion(), 20.0) for _ in range(2)]
    for each in sessions:
        await each.reset(TASK, 0)
    impatient = pool.session(GroupVersion(), 0.5)
    with pytest.raises(HostAway, match="capacity"):
        await impatient.reset(TASK, 0)
    patient = pool.session(GroupVersion(), 20.0)
    waiting = asyncio.ensure_future(patient.reset(TASK, 0))
    await sessions[0].close()
    await waiting
    for each in (*sessions, impatient, patient):
        await each.close()
    await pool.close()


CLIENT = """\
import asyncio, sys
from openenv.core import GenericEnvClient

async def main():
    async with GenericEnvClient(base_url=sys.argv[1]) as env:
        shown = await env.reset(seed=4)
        key = shown.observation["text"].removeprefix("find ")
        done = False
        while not done:
            result = await env.step({"tool": "get", "arguments": {"key": key}})
            _, _, value = result.observation["text"].partition("=")
            key = value.removeprefix("@")
            if not value.startswith("@"):
                result = await env.step({"message": value})
                done = result.done
        state = await env.state()
        assert state["step_count"] >= 2, state
        assert (result.reward, result.done) == (1.0, True), result
        try:
            await env.step({"word": "x"})
        except RuntimeError as error:
            assert "VALIDATION_ERROR" in str(error), error
        else:
            raise AssertionError("a step of another form was taken")

asyncio.run(main())
"""


def test_openenvs_own_client_plays_on_our_host(tmp_path):
    host = start(tmp_path, "env", "serve", "lookup", "--json")
    try:
        address = json.loads(host.stdout.readline())["address"]
        (tmp_path / "client.py").write_text(CLIENT)
        done = subprocess.run(
            [sys.executable, "client.py", address],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        host.terminate()
        began = time.monotonic()
        out, err = host.communicate(timeout=20)
        assert (host.returncode, time.monotonic() - began < 10) == (0, True), err
        assert json.loads(out)["sessions"] == 1
    finally:
        host.kill()
        host.communicate()
