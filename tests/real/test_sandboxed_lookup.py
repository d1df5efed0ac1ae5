"""Environments over real boxes: lookup with its store as files, and the one that docs/own-environment.md shows."""

import asyncio
import contextlib
import os
import re
import select
import signal
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fast"))

import box_kinds
from episode_kit import lookup_renderer, lookup_solution, lookup_task, make_plan, play, says

from headrace.actors.environments.faulty import with_faults, with_recorded_faults
from headrace.actors.environments.lookup import LookupEnvironment, SandboxedLookup
from headrace.platform.config.faults import FaultConfig
from headrace.platform.errors import SandboxDied
from headrace.platform.records import Message, Role, SamplingParams, Status, Task
from headrace.platform.records.message import ToolCall
from headrace.platform.testing.conformance.environment import ENVIRONMENT_SUITE, EnvironmentContext

TASK = lookup_task(hops=(2,))
FIRST, SECOND = TASK.data["chain"]
PAGE = Path(__file__).resolve().parents[2] / "docs/own-environment.md"


@pytest.fixture
async def provider(tmp_path):
    before = children()  # another file's daemon may be among them
    provider = box_kinds.provider("bubblewrap", tmp_path / "state")
    yield provider
    await provider.close()
    assert set(children()) <= set(before) and not boxes(tmp_path), "a box's process is left"
    assert not [path for path in (tmp_path / "state").rglob("*") if path.is_file()], "a box's files are left"


def children(pid="self"):
    """The processes that one has started and not yet waited for."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def boxes(folder):
    """The processes that name this folder on their command line, whoever is their parent by now."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if bytes(folder) in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def kill_and_wait(pid):
    """Returns when it is dead."""
    watched = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    select.select([watched], [], [])
    os.close(watched)


def made(provider, kind=SandboxedLookup):
    environment = kind()
    environment.use_sandboxes(provider)
    return environment


def get(key, name="get"):
    return Message(Role.ASSISTANT, tool_calls=(ToolCall(name, {"key": key}, "call_0"),))


def say(text):
    return Message(Role.ASSISTANT, text)


@pytest.mark.parametrize("name", ENVIRONMENT_SUITE)
async def test_lookup_in_boxes_conforms(provider, name):
    script = [get(FIRST), get(SECOND), say(TASK.data["answer"])]
    make = lambda: made(provider)  # noqa: E731
    await ENVIRONMENT_SUITE[name](EnvironmentContext(make=make, task=TASK, script=script, effect=get(FIRST)))


@pytest.mark.parametrize("name", ENVIRONMENT_SUITE)
async def test_the_environment_of_the_page_conforms(provider, name):
    code = re.search(r'```python title="counting.py"\n(.*?)```', PAGE.read_text(), re.S).group(1)
    names = {"__name__": "counting"}
    exec(compile(code, "counting.py", "exec"), names)
    counting = names["Counting"]
    task = Task("t", "counting", counting.tasks("train", 0)[3])
    script = counting.demonstrate(task)
    context = EnvironmentContext(make=lambda: made(provider, counting), task=task, script=script, effect=script[0])
    await ENVIRONMENT_SUITE[name](context)
    if name == "the_script_ends_once":
        world, _ = await context.begin()
        results = [await world.step(message, str(number)) for number, message in enumerate(script)]
        assert results[-1].rewards[0].value == 1.0
        await world.close()


# case X5
async def test_it_says_and_is_what_lookup_in_memory_says_and_is(provider):
    plain, boxed = LookupEnvironment(), made(provider)
    assert await boxed.reset(TASK, 1) == await plain.reset(TASK, 1)
    keys = [FIRST, SECOND, "k99", "", ".", "..", "*", "-n", "a'b", "k\n07", "\0", "ä", "k" * 300, 7, None]
    keys += [f"../store/{FIRST}", f"./{FIRST}", f"{FIRST} {SECOND}", f"{FIRST}; echo out", f"$(echo {FIRST})"]
    keys += [f"{FIRST}' store/'{SECOND}", "../../etc/passwd", "/etc/passwd", "`id`"]
    for number, message in enumerate([*map(get, keys), get(FIRST, "put"), say(TASK.data["answer"])]):
        assert await boxed.step(message, str(number)) == await plain.step(message, str(number))
    await boxed.close()


# case E10
async def test_a_retry_after_a_dirty_failure_begins_like_the_first_attempt(provider):
    world = made(provider)
    clean = await world.reset(TASK, 3)
    first = await world.step(get(FIRST), "0")
    await world.box.run(f"echo v00 > store/{FIRST}; touch dirt /tmp/dirt; export LEFT=over; cd /tmp", 5)
    await world.close()
    retry = made(provider)
    assert await retry.reset(TASK, 3) == clean
    assert await retry.step(get(FIRST), "0") == first
    seen = await retry.box.run('ls . /tmp; echo "left: $LEFT"', 5)
    assert "dirt" not in seen.output and "left: \n" in seen.output
    await retry.close()


async def test_the_hash_of_a_workspace_knows_contents_modes_and_links_and_no_times(provider):
    worlds = [made(provider) for _ in range(2)]
    for world in worlds:
        await world.reset(TASK, 0)
        await world.box.run("echo a > 'a file'; ln -s store link", 5)
    assert await worlds[0].workspace_hash() == await worlds[1].workspace_hash()
    found = [await worlds[0].workspace_hash()]
    changes = ["echo b > 'a file'", "chmod 600 'a file'", "ln -sfn /tmp link", "mkdir deep", "chmod 000 'a file'"]
    for command in changes:
        await worlds[0].box.run(command, 5)
        found.append(await worlds[0].workspace_hash())
    assert len(set(found)) == len(changes) + 1
    await worlds[0].box.run("touch -d 2001-01-01 deep; echo x > /tmp/x; cd /tmp", 5)
    assert await worlds[0].workspace_hash() == found[-1]
    await worlds[0].box.run("PATH=/nowhere", 5)
    assert await worlds[0].workspace_hash() == found[-1]
    for world in worlds:
        await world.close()


# case E13
async def test_a_killed_box_ends_the_step_at_once(provider):
    world, before = made(provider), children()
    await world.reset(TASK, 0)
    ((shell,),) = map(children, set(children()) - set(before))
    kill_and_wait(shell)
    began = time.monotonic()
    with pytest.raises(SandboxDied):
        await world.step(get(FIRST), "0")
    assert time.monotonic() - began < 1.0
    await world.close()
    await world.reset(TASK, 0)
    assert (await world.step(get(FIRST), "0")).messages[0].content == f"{FIRST}=@{SECOND}"
    await world.close()


# case X4
@pytest.mark.parametrize("after_s", [0.0, 0.002, 0.005, 0.01, 0.02, 0.04, 0.08])
async def test_cancelled_anywhere_nothing_is_left(provider, after_s):
    async def episode():
        world = made(provider)
        try:
            await world.reset(TASK, 0)
            saved = await world.snapshot()
            await world.step(get(FIRST), "0")
            await world.restore(saved)
        finally:
            await world.close()

    task = asyncio.create_task(episode())
    await asyncio.wait([task], timeout=after_s)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() or task.exception() is None


async def test_an_episode_is_played_struck_and_replayed(provider, tmp_path):
    renderer = lookup_renderer(tmp_path)
    plan = make_plan(TASK, sampling=SamplingParams(max_new_tokens=16, stop_token_ids=renderer.stop_token_ids))
    faults = [FaultConfig(kind="kill_sandbox", steps=(2,))]
    for first in (True, False):
        session = with_faults(made(provider), faults, 0, first)
        played = await play(session, says(*lookup_solution(renderer, TASK)), renderer, plan)
        episode = played.episode
        assert episode.sandbox_id
        if not first:
            assert (played.score, episode.injected_faults) == (1.0, ())
            continue
        assert (episode.status, episode.fault_owner, played.score) == (Status.ENV_TRANSIENT, "infrastructure", None)
        replay = with_recorded_faults(made(provider), episode.injected_faults)
        await replay.reset(TASK, plan.seed)
        await replay.step(get(FIRST), "0")
        with pytest.raises(SandboxDied) as died:
            await replay.step(get(SECOND), "1")
        assert episode.fault == f"SandboxDied: {died.value}"
        await replay.close()
