"""Who may open a door, and what a recipe must say for harnesses to play."""

import asyncio
import contextlib

import httpx2
import pytest
from episode_kit import make_plan
from harness_kit import TASK, Engine, make_door, numbered

from headrace.actors.harness.environment import HarnessArgs, HarnessEnvironment
from headrace.actors.harness.play import Doorway, play_harness
from headrace.actors.worlds import Worlds
from headrace.deploy.cli import app
from headrace.deploy.serving_door import PublicDoor, check_reach, open_worker_doors
from headrace.platform.config.load import load_recipe
from headrace.platform.errors import ConfigError, EnvironmentFault, NotFound
from headrace.platform.records import Task
from headrace.platform.testing.episodes import make_episode, policy_turn

RECIPE = """\
name: talk
environments:
  - name: harness
    args: {%s}
    tasks: {source: ./tasks.jsonl}
    %s
model: {tiny_llama: {vocabulary: bytes}}
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.jsonl").write_text("".join(f'{{"prompt": "go {n}", "answer": "a"}}\n' for n in range(40)))

    def load(args="", more="scorer: {kind: exact}"):
        (tmp_path / "talk.yaml").write_text(RECIPE % (args, more))
        return load_recipe("./talk.yaml", [], tmp_path)

    return load


@pytest.mark.parametrize(
    ("host", "token", "is_refused"),
    [
        ("127.0.0.1", "", False),
        ("localhost", "", False),
        ("::1", "", False),
        ("0.0.0.0", "", True),
        ("example.org", "", True),
        ("0.0.0.0", "t", False),
    ],
)
def test_only_loopback_is_open(host, token, is_refused):
    if is_refused:
        with pytest.raises(ConfigError, match="give a token"):
            check_reach(host, token)
        with pytest.raises(ConfigError, match="give a token"):
            PublicDoor(make_door(Engine(numbered("x"))), host=host, port=0, token=token)
    else:
        check_reach(host, token)


def test_a_token_is_no_literal(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    result = CliRunner().invoke(app, ["serve", "no-run", "--host", "0.0.0.0"])
    assert isinstance(result.exception, ConfigError)
    result = CliRunner().invoke(app, ["serve", "no-run", "--token", "abc"])
    assert "must be a reference" in str(result.exception)


async def test_a_harness_needs_a_scorer(recipe, tmp_path):
    with pytest.raises(ConfigError, match=r"environments\.harness has no scorer"):
        await open_worker_doors(recipe(more=""), 0, tmp_path, Engine(numbered("x")))


@pytest.mark.parametrize(
    ("args", "told"),
    [("hots: x", "did you mean 'host'"), ("port: -1", "port: Input should be greater"), ("env: 3", "env: Input")],
)
def test_wrong_args_are_told_before_anything_starts(recipe, args, told):
    config = recipe(args)
    with pytest.raises(ConfigError, match=told):
        Worlds(config.environments, "train", 0)


async def test_it_opens_with_the_task_and_cannot_be_stepped(recipe):
    config = recipe("system: Be brief., shown: [prompt]")
    worlds = Worlds(config.environments, "train", 0)
    setting = worlds.setting(0)
    session = worlds.session(setting)
    observation = await session.reset(setting.task, setting.seed)
    assert [(each.role, each.content) for each in observation.messages] == [
        ("system", "Be brief."),
        ("user", setting.task.data["prompt"]),
    ]
    assert observation.metadata == {
        "task_id": setting.task.task_id,
        "seed": setting.seed,
        "prompt": setting.task.data["prompt"],
    }
    with pytest.raises(EnvironmentFault, match="cannot be run again"):
        await session.step(observation.messages[1], "k")
    await session.close()


@pytest.mark.parametrize("value", [float("nan"), "\ud800", b"x"])
async def test_what_cannot_be_shown_is_a_fault_of_the_task(value):
    session = HarnessEnvironment(HarnessArgs(shown=("hint",)))
    task = Task("t9", "harness", {"prompt": "go", "hint": value})
    with pytest.raises(EnvironmentFault, match=r"t9: what args\.shown names"):
        await session.reset(task, 0)


async def test_replays_are_refused_by_name(recipe):
    worlds = Worlds(recipe().environments, "train", 0)
    task = worlds.setting(0).task
    episode = make_episode((policy_turn(),), task=task, environment="harness", environment_version="1")
    with pytest.raises(NotFound, match="was played by a harness"):
        await worlds.session_of(episode)


async def test_an_episode_does_not_go_to_a_client_that_has_left():
    engine = Engine(numbered("done"))
    async with playing_nothing(engine) as (door, public):
        async with httpx2.AsyncClient(base_url=public.url) as client:
            with pytest.raises(httpx2.ReadTimeout):
                await client.post("/episodes", json={"wait_s": 60}, timeout=0.2)
        async with asyncio.timeout(10):  # until the door has seen that it left
            while door._offered._waiters:  # noqa: ASYNC110 - the door tells nobody who waits
                await asyncio.sleep(0.01)
        plan, args = make_plan(TASK), HarnessArgs()
        doorway = Doorway(door=door, args=args)
        episode = asyncio.create_task(play_harness(plan, HarnessEnvironment(args), engine, doorway))
        async with httpx2.AsyncClient(base_url=public.url) as client:
            opened = (await client.post("/episodes", json={"wait_s": 5})).json()
            await client.delete(f"/episodes/{opened['id']}")
        assert (await episode).score is None


@contextlib.asynccontextmanager
async def playing_nothing(engine):
    door = make_door(engine)
    public = PublicDoor(door, host="127.0.0.1", port=0)
    await public.start()
    try:
        yield door, public
    finally:
        await public.close()


async def test_a_taken_port_is_named():
    first = PublicDoor(make_door(Engine(numbered("x"))), host="127.0.0.1", port=0)
    await first.start()
    try:
        with pytest.raises(ConfigError, match=f"port {first.port}"):
            await PublicDoor(make_door(Engine(numbered("x"))), host="127.0.0.1", port=first.port).start()
    finally:
        await asyncio.wait_for(first.close(), 10)
