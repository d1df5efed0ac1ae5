"""MCP servers behind the gateway: what is believed of them, and what becomes of them."""

import asyncio
import json
import os
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from headrace.actors.gateway.decisions.asked import Asked, EpisodeState
from headrace.actors.gateway.perform.performers import Performers, Refused, ToolFailed
from headrace.actors.gateway.policy import Mount, Policy
from headrace.platform.errors import ConfigError, GatewayAway, InfrastructureFault
from headrace.platform.records import ToolCall
from headrace.platform.records.status import Capability, SideEffectTier

SERVER = str(Path(__file__).resolve().parents[1] / "odd_mcp_server.py")


class Episode:
    """One that has the tools of a server."""

    def __init__(self, performers, policy, specs, scope):
        self.performers = performers
        self.state = EpisodeState(scope, policy, specs, frozenset(specs), (), 0.0)

    async def call(self, text, name="echo"):
        asked = Asked(ToolCall(name, {"text": text}), self.state.specs[name], "k/0", True)
        return await self.performers.perform(asked, self.state)

    async def end(self):
        await self.performers.end(self.state.scope)


@asynccontextmanager
async def served(mode="", name="", capability=None, secrets=None, **args):
    """A function that begins episodes with the tools of a server."""
    given = {"command": sys.executable, "args": [SERVER, *([mode] if mode else [])], **args}
    policy = Policy(mounts=(Mount("mcp", name, capability, given),))
    performers = Performers(env=secrets or {})
    try:
        specs = {name: spec for name, (_, spec) in (await performers.mount(policy.mounts)).items()}
        yield lambda scope="e/0#1": Episode(performers, policy, specs, scope)
    finally:
        await performers.close()


async def test_hints_of_a_server_are_not_believed():
    async with served() as begin:
        spec = begin().state.specs["echo"]
    assert (spec.tier, spec.capability, spec.trusted) == (SideEffectTier.WRITE, Capability.WRITE, False)
    assert spec.description == "Says it again.<U+202E>"
    assert spec.parameters["required"] == ["text"]


async def test_a_recipe_says_what_a_tool_does():
    said = {"echo": {"tier": "read", "reads": {"text": "url"}, "price": 2.0, "trusted": True}}
    async with served(name="odd", tools=said) as begin:
        spec = begin().state.specs["odd_echo"]
        assert (spec.tier, spec.capability) == (SideEffectTier.READ, Capability.READ)
        assert (spec.reads, spec.price, spec.trusted) == ({"text": "url"}, 2.0, True)
        assert (await begin().call("hello", "odd_echo")).content == "hello\n[image, not shown]"
    own = {"echo": {"capability": "network"}}
    async with served(capability=Capability.SECRET, tools=own) as begin:
        assert begin().state.specs["echo"].capability is Capability.NETWORK
    async with served(capability=Capability.SECRET) as begin:
        assert begin().state.specs["echo"].capability is Capability.SECRET


async def test_answers_errors_and_nonsense():
    async with served() as begin:
        episode = begin()
        refused = await episode.call("refuse")
        assert (refused.content, refused.ok) == ("I will not", False)
        with pytest.raises(ToolFailed, match="bad arguments"):
            await episode.call("error")
        with pytest.raises(ToolFailed, match="cannot be read"):
            await episode.call("nonsense")
        assert (await episode.call("hello")).ok


async def test_calls_overlap_and_keep_their_answers():
    async with served() as begin:
        episode = begin()
        said = await asyncio.gather(*[episode.call(f"n{index}") for index in range(20)])
        assert [each.content.partition("\n")[0] for each in said] == [f"n{index}" for index in range(20)]


@pytest.mark.parametrize(("mode", "text"), [("changes", "hello"), ("", "announce")])
async def test_a_server_that_changes_its_tools_is_asked_for_nothing_more(mode, text):
    async with served(mode) as begin:
        episode = begin()
        await episode.call(text)
        for _ in range(2):
            with pytest.raises(Refused) as refused:
                await episode.call("count")
            assert refused.value.denial.rule == "gateway:definition_changed"


async def test_each_episode_has_a_process_of_its_own_that_ends_with_it():
    async with served() as begin:
        one, two = begin("one"), begin("two")
        pids = [int((await each.call("pid")).content.partition("\n")[0]) for each in (one, two, one)]
        assert pids[0] == pids[2] != pids[1]
        assert (await one.call("count")).content.startswith("3\n") and (await two.call("count")).content.startswith(
            "2\n"
        )
        await one.end()
        assert not psutil.pid_exists(pids[0]) and psutil.pid_exists(pids[1])
        await begin("unknown").end()
    assert not psutil.pid_exists(pids[1])


async def test_a_shared_process_outlives_episodes_and_is_begun_again():
    async with served(shared=True) as begin:
        one, two = begin("one"), begin("two")
        pids = [(await each.call("pid")).content for each in (one, two)]
        await one.end()
        assert pids[0] == pids[1] == (await two.call("pid")).content
        with pytest.raises(InfrastructureFault):
            await two.call("die")
        assert (await two.call("pid")).content != pids[0]


async def test_a_server_that_dies_is_nobodys_answer():
    async with served(secrets={"TOKEN": "tok-123"}, args=[SERVER, "${env:TOKEN}"]) as begin:
        episode = begin()
        with pytest.raises(InfrastructureFault, match=r"is gone.*Connection closed") as gone:
            await episode.call("die")
        assert "tok-123" not in str(gone.value)
        with pytest.raises(InfrastructureFault, match="is gone"):  # its state is lost, so it is not begun again
            await episode.call("hello")
        assert (await begin("next").call("hello")).ok


async def test_a_slow_call_is_cancelled_and_its_process_ends():
    async with served() as begin:
        episode = begin()
        pid = int((await episode.call("pid")).content.partition("\n")[0])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await episode.call("hang")
        await episode.end()
        assert not psutil.pid_exists(pid)


async def test_a_process_has_the_environment_that_it_is_given(monkeypatch):
    monkeypatch.setenv("HEADRACE_TEST_SECRET", "tok-999")
    async with served(secrets={"TOKEN": "tok-123"}, env={"GIVEN": "x ${env:TOKEN}"}) as begin:
        said = (await begin().call("env")).content.partition("\n")[0]
    seen = json.loads(said)
    assert seen.pop("GIVEN") == "x [secret]"
    assert set(seen) <= {"HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER", "LC_CTYPE"}
    assert "HEADRACE_TEST_SECRET" in os.environ


@pytest.mark.parametrize(
    ("mode", "args", "told"),
    [
        ("", {"comand": "x"}, "args.comand is unknown; did you mean command"),
        ("", {"command": "/nonexistent/server"}, "args.command: .*nonexistent"),
        ("", {"only": ["ecko"]}, "has no tool 'ecko'; it has echo"),
        ("", {"tools": {"ecko": {}}}, "has no tool 'ecko'"),
        ("", {"tools": {"echo": {"teer": "read"}}}, "teer"),
        ("", {"tools": {"echo": {"tier": "reed"}}}, "tools"),
        ("", {"env": {"X": "${env:MISSING}"}}, r"\$\{env:MISSING\} is missing"),
        ("none", {}, "has no tools"),
        ("named", {}, "no name that a model can use"),
        ("outside", {}, "no JSON Schema"),
    ],
)
async def test_wrong_mounts_are_named(mode, args, told):
    given = {"command": sys.executable, "args": [SERVER, mode], **args}
    performers = Performers(env={})
    with pytest.raises(ConfigError, match=told):
        await performers.mount((Mount("mcp", "", None, given),))
    await performers.close()


async def test_a_server_that_does_not_come_up_says_why_without_secrets():
    given = {"command": sys.executable, "args": [SERVER, "dead"], "env": {"T": "${env:TOKEN}"}}
    performers = Performers(env={"TOKEN": "tok-123"})
    with pytest.raises(GatewayAway, match="did not come up") as away:
        await performers.mount((Mount("mcp", "", None, given),))
    assert "tok-123" not in str(away.value)
    await performers.close()


async def test_descriptions_are_bounded():
    async with served("long") as begin:
        assert len(begin().state.specs["echo"].description) <= 4096
