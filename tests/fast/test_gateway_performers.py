"""The tools that the gateway performs: which there are, who performs which call, and what is shared."""

import asyncio

import pytest

from headrace.actors.gateway.decisions.asked import Asked, EpisodeState
from headrace.actors.gateway.perform.performers import Performers
from headrace.actors.gateway.policy import Mount, Policy
from headrace.platform.errors import ConfigError
from headrace.platform.records import ToolCall
from headrace.platform.records.status import Capability


@pytest.fixture
async def performers():
    made = Performers(env={"WORD": "xyzzy"})
    yield made
    await made.close()


@pytest.fixture
def folders(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.txt").write_text(f"the words of {name}, and xyzzy")
    return {name: Mount("search", "", None, {"corpus": str(tmp_path / name)}) for name in ("one", "two")}


def episode(policy, specs):
    return EpisodeState("e/0#1", policy, specs, frozenset(specs), (), 0.0)


async def call(performers, state, name, **arguments):
    asked = Asked(ToolCall(name, arguments), state.specs[name], "k/0", True)
    return (await performers.perform(asked, state)).content


async def test_equal_mounts_are_built_once_whoever_asks_first(performers, folders):
    first, second = await asyncio.gather(*[performers.mount((folders["one"],)) for _ in range(2)])
    assert first["search"][0] is second["search"][0]
    other = await performers.mount((folders["two"],))
    assert other["search"][0] is not first["search"][0]


async def test_a_call_goes_to_the_tool_of_its_own_policy(performers, folders):
    for name, mount in folders.items():
        policy = Policy(mounts=(Mount("shell"), mount))
        specs = {tool: spec for tool, (_, spec) in (await performers.mount(policy.mounts)).items()}
        assert set(specs) == {"search", "read_document"}  # what is boxed is not performed here
        assert await call(performers, episode(policy, specs), "search", query="words") == (
            f"id: {name}.txt\ntitle: the words of {name}, and xyzzy\nthe words of {name}, and xyzzy"
        )


async def test_what_one_mount_holds_secret_no_other_tool_tells(performers, folders):
    headers = {"headers": {"a.example.org": {"X-Key": "${env:WORD}"}}}
    policy = Policy(mounts=(folders["one"], Mount("http", "", None, headers)))
    specs = {tool: spec for tool, (_, spec) in (await performers.mount(policy.mounts)).items()}
    said = await call(performers, episode(policy, specs), "read_document", id="one.txt")
    assert said.endswith("the words of one, and [secret]")


async def test_a_capability_of_the_recipe_holds(performers, folders):
    mount = Mount("search", "", Capability.SECRET, dict(folders["one"].args))
    made = await performers.mount((mount,))
    assert {spec.capability for _, spec in made.values()} == {Capability.SECRET}


async def test_names_that_clash_and_kinds_that_are_none_are_named(performers, folders):
    with pytest.raises(ConfigError, match="two are called 'search'"):
        await performers.mount(tuple(folders.values()))
    with pytest.raises(ConfigError, match="no kind 'htp'"):
        await performers.mount((Mount("htp"),))


async def test_what_failed_is_tried_again(performers, folders, tmp_path):
    mount = Mount("search", "", None, {"corpus": str(tmp_path / "late")})
    for _ in range(2):
        with pytest.raises(ConfigError, match="is no folder"):
            await performers.mount((mount,))
    (tmp_path / "late").mkdir()
    (tmp_path / "late" / "a.txt").write_text("here")
    assert set(await performers.mount((mount,))) == {"search", "read_document"}


async def test_closing_twice_and_ending_strangers_is_nothing(performers, folders):
    await performers.mount((folders["one"], Mount("http")))
    await performers.end("a stranger")
    await performers.close()
    await performers.close()


async def test_what_no_episode_uses_is_let_go_but_the_last_ones(performers, tmp_path, monkeypatch):
    monkeypatch.setattr("headrace.actors.gateway.perform.performers._MOST_UNUSED", 2)
    mounts = []
    for number in range(5):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "a.txt").write_text("words")
        mounts.append(Mount("search", "", None, {"corpus": str(tmp_path / str(number))}))
    made = await performers.mount((mounts[0],))
    first, state = made["search"][0], episode(Policy(mounts=(mounts[0],)), {n: spec for n, (_, spec) in made.items()})
    await call(performers, state, "search", query="words")
    closed = []
    monkeypatch.setattr(type(first), "close", lambda self: _noted(closed, self))
    for mount in mounts[1:]:
        await performers.mount((mount,))
    assert len(closed) == 2 and first not in closed and len(performers._made) == 3
    assert "a.txt" in await call(performers, state, "search", query="words")
    await performers.end(state.scope)
    for mount in mounts[1:4]:
        policy = Policy(mounts=(mount,))
        later = EpisodeState(f"{policy.digest}#1", policy, state.specs, state.mounted, (), 0.0)
        await call(performers, later, "search", query="words")
        await performers.end(later.scope)
    assert first in closed and len(performers._uses) == 2  # its policy was used longest ago
    assert "a.txt" in await call(performers, state, "search", query="words")  # made anew
    assert (await performers.mount((mounts[0],)))["search"][0] is not first
    await performers.end(state.scope)


async def _noted(closed, performer):
    closed.append(performer)
