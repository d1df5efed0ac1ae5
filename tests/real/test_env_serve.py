"""`headrace env serve` as processes: episodes over it, the ways in which a host ends, and who is refused."""

import asyncio
import contextlib
import json
import signal
import time

import pytest
from command_line import environment, run, start

from headrace import Message, Role, Task
from headrace.actors.environments.lookup import LookupEnvironment, LookupTasks
from headrace.actors.remote.group_version import GroupVersion
from headrace.actors.remote.pools import EnvironmentPool
from headrace.actors.remote.registry_file import read_registry
from headrace.platform.config.pools import PoolConfig
from headrace.platform.errors import EnvironmentFault, HostAway
from headrace.platform.records.message import ToolCall

WORLD = """\
import sys
import threading
import headrace

class World(headrace.ReplayedEnvironment):
    name = "world"

    def __init__(self, version="1"):
        self.version = version

    def tools(self):
        return ()

    def _reset(self, task, seed):
        heavy = {"ray", "torch", "redis", "valkey", "transformers"} & set(sys.modules)
        return headrace.Observation((headrace.Message(headrace.Role.USER, "go"),), metadata={"loaded": sorted(heavy)})

    def _step(self, message):
        if message.content == "hang":
            threading.Event().wait()
        if message.content == "raise":
            raise KeyError("wall")
        return headrace.StepResult((headrace.Message(headrace.Role.USER, "on"),), terminated=message.content == "end")
"""
TASK = Task("t", "world")


@contextlib.contextmanager
def serving(folder, *args, **env):
    """A host process; `.address` and `.pid` as it printed them."""
    process = start(folder, "env", "serve", *args, "--json", env=environment(**env))
    try:
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        process.ready = json.loads(line)
        process.address = process.ready["address"]
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def world(tmp_path):
    (tmp_path / "world.py").write_text(WORLD)
    return tmp_path


def pool_of(*hosts, name="world", token="", **config):
    if hosts:
        config["hosts"] = tuple(each.address for each in hosts)
    return EnvironmentPool(PoolConfig(**config), name, token)


def say(text):
    return Message(Role.ASSISTANT, text)


def ended(process, timeout_s=20.0):
    """Exit code, the summary on the last line, and seconds that it took."""
    began = time.monotonic()
    out, err = process.communicate(timeout=timeout_s)
    lines = out.strip().splitlines()
    return process.returncode, json.loads(lines[-1]) if lines else err, time.monotonic() - began


async def answers(session, task):
    """A whole episode, by whoever reads the store."""
    found = [await session.reset(task, task.seed)]
    for n, key in enumerate(["k99x", *task.data["chain"]]):
        call = Message(Role.ASSISTANT, tool_calls=(ToolCall("get", {"key": key}, f"c{n}"),))
        found.append(await session.step(call, f"{task.task_id}/{n}"))
    found.append(await session.step(say(task.data["answer"]), f"{task.task_id}/end"))
    await session.close()
    return found


def test_whole_episodes_equal_local_ones(tmp_path):
    async def play(host):
        pool = pool_of(host, name="lookup")
        tasks = LookupTasks("train", 0).next(64)
        sessions = [pool.session(GroupVersion(), 20.0) for _ in tasks]
        remote = await asyncio.gather(*map(answers, sessions, tasks))
        assert remote == [await answers(LookupEnvironment(), task) for task in tasks]  # hashes included
        assert {(each.name, each.version) for each in sessions} == {("lookup", "1")}
        assert {each.provenance.image_digest for each in sessions} == {"sha256:abc"}
        assert {each.provenance.pool for each in sessions} == {host.address}
        await pool.close()

    with serving(tmp_path, "lookup", HEADRACE_IMAGE_DIGEST="sha256:abc") as host:
        assert {key: host.ready[key] for key in ("environment", "version", "capacity")} == {
            "environment": "lookup",
            "version": "1",
            "capacity": 64,
        }
        asyncio.run(play(host))


def test_a_host_loads_neither_cluster_nor_queue_nor_model(world):
    async def loaded(host):
        pool = pool_of(host)
        session = pool.session(GroupVersion(), 20.0)
        observation = await session.reset(TASK, 0)
        with pytest.raises(EnvironmentFault, match=r"world\.py:22 in _step: KeyError: 'wall'") as found:
            await session.step(say("raise"), "k")
        assert found.value.transient is False
        await session.close()
        await pool.close()
        return observation.metadata["loaded"]

    with serving(world, "world.py:World") as host:
        assert asyncio.run(loaded(host)) == []


def test_sigterm_drains_and_nothing_is_lost(world):
    registry = world / "hosts.json"

    async def play(old, new):
        pool = pool_of(source=str(registry))
        first, second = pool.session(GroupVersion(), 20.0), pool.session(GroupVersion(), 20.0)
        await first.reset(TASK, 0)
        await second.reset(TASK, 0)
        assert {first.provenance.pool, second.provenance.pool} == {old.address, new.address}
        (leaving, staying) = (first, second) if first.provenance.pool == old.address else (second, first)
        hanging = pool.session(GroupVersion(), 20.0)
        while hanging.provenance.pool != old.address:
            await hanging.close()
            hanging = pool.session(GroupVersion(), 20.0)
            await hanging.reset(TASK, 0)
        old.send_signal(signal.SIGTERM)
        async with asyncio.timeout(5):
            while read_registry(registry) != [new.address]:  # noqa: ASYNC110 - another process writes it
                await asyncio.sleep(0.02)
        for _ in range(8):  # nothing new begins there
            session = pool.session(GroupVersion(), 20.0)
            await session.reset(TASK, 0)
            assert session.provenance.pool == new.address
            await session.close()
        assert not (await leaving.step(say("on"), "k0")).terminated  # what was at play goes on
        assert (await leaving.step(say("end"), "k1")).terminated
        with pytest.raises(HostAway, match="drained before the episode ended"):
            await hanging.step(say("hang"), "k")
        assert (await staying.step(say("end"), "k")).terminated
        for each in (first, second, hanging):
            await each.close()
        await pool.close()

    with serving(world, "world.py:World", "--registry", "hosts.json", "--grace", "3") as old:
        assert read_registry(registry) == [old.address]
        with serving(world, "world.py:World", "--registry", "hosts.json") as new:
            asyncio.run(play(old, new))
            code, summary, _ = ended(old)
            assert (code, summary["cancelled"]) == (0, 1)  # though a thread of it never ends
            new.send_signal(signal.SIGTERM)
            code, summary, seconds = ended(new)
            assert (code, summary["cancelled"], read_registry(registry)) == (0, 0, [])
            assert seconds < 10


def test_a_second_sigterm_does_not_wait(world):
    async def play(host):
        pool = pool_of(host)
        session = pool.session(GroupVersion(), 20.0)
        await session.reset(TASK, 0)
        host.send_signal(signal.SIGTERM)
        other = pool.session(GroupVersion(), 2.0)
        with pytest.raises(HostAway, match="draining"):
            await other.reset(TASK, 0)
        host.send_signal(signal.SIGTERM)
        with pytest.raises(HostAway, match="drained before"):
            await session.step(say("hang"), "k")
        await session.close()
        await pool.close()

    with serving(world, "world.py:World", "--grace", "60") as host:
        asyncio.run(play(host))
        assert ended(host)[:2] == (0, {"address": host.address, "sessions": 1, "cancelled": 1})


def test_a_killed_host_is_noticed_at_once_and_its_successor_too(world):
    async def play(host, again):
        pool = pool_of(source=str(world / "hosts.json"))
        session = pool.session(GroupVersion(), 20.0)
        await session.reset(TASK, 0)
        step = asyncio.ensure_future(session.step(say("hang"), "k"))
        await asyncio.sleep(0.1)
        host.kill()
        began = time.monotonic()
        with pytest.raises(HostAway, match="connection is lost"):
            await step
        assert time.monotonic() - began < 1.0  # case E13
        await session.close()
        waiting = asyncio.ensure_future(pool.session(GroupVersion(), 60.0).reset(TASK, 0))
        await asyncio.sleep(0)
        successor = again.enter_context(serving(world, "world.py:World", "--registry", "hosts.json"))
        await waiting
        assert read_registry(world / "hosts.json") == [host.address, successor.address]
        assert {each.address: each.sessions for each in pool.hosts()}[successor.address] == 1
        await pool.close()

    with contextlib.ExitStack() as again, serving(world, "world.py:World", "--registry", "hosts.json") as host:
        asyncio.run(play(host, again))


def test_full_hosts_wrong_tokens_and_silence(world):
    (world / "token").write_text("geheim\n")

    async def play(host):
        right = pool_of(host, token="geheim")
        one, two = right.session(GroupVersion(), 20.0), right.session(GroupVersion(), 1.0)
        await one.reset(TASK, 0)
        with pytest.raises(HostAway, match="all 1 places are taken"):
            await two.reset(TASK, 0)
        wrong = pool_of(host, token="falsch")
        with pytest.raises(HostAway, match="refused the token"):
            await wrong.session(GroupVersion(), 1.0).reset(TASK, 0)
        other = pool_of(host, token="geheim")
        await other.session(GroupVersion(), 30.0).reset(TASK, 0)  # `one` says nothing, so its place becomes free
        with pytest.raises(HostAway, match="nothing was said for 2 s"):
            await one.step(say("on"), "k")
        for each in (right, wrong, other):
            await each.close()

    args = ("--token", "${file:token}", "--capacity", "1", "--idle", "2")
    with serving(world, "world.py:World", *args) as host:
        asyncio.run(play(host))


def test_two_versions_at_once(world):  # P17
    async def play(one, two):
        pool = pool_of(one, two)
        seen = set()
        for _ in range(6):
            group = GroupVersion()
            sessions = [pool.session(group, 20.0) for _ in range(4)]
            await asyncio.gather(*(each.reset(TASK, 0) for each in sessions))
            assert len({each.version for each in sessions}) == 1
            seen.add(sessions[0].version)
            if len(seen) == 1:  # keep its places, so that the other host has more of them
                continue
            await asyncio.gather(*(each.close() for each in sessions))
        assert seen == {"1", "2"}
        two.kill()
        group = GroupVersion(version="2", has_begun=True)
        began = time.monotonic()
        with pytest.raises(HostAway, match="played in version 2, and no host has it"):
            await pool.session(group, 60.0).reset(TASK, 0)
        assert time.monotonic() - began < 10
        await pool.close()

    args = ("world.py:World", "--args", '{"version": "2"}')
    with serving(world, "world.py:World") as one, serving(world, *args) as two:
        asyncio.run(play(one, two))


def test_a_host_puts_tools_into_a_sandbox(tmp_path):
    async def play(host):
        pool = pool_of(host, name="lookup")
        (task,) = LookupTasks("train", 0).next(1)
        session = pool.session(GroupVersion(), 60.0)
        found = await answers(session, task)
        local = await answers(LookupEnvironment(), task)
        assert [each.messages for each in found] == [each.messages for each in local]
        assert found[-1].rewards == local[-1].rewards
        assert session.provenance.sandbox_id
        assert session.provenance.pool == host.address
        assert session.version == host.ready["version"] != LookupEnvironment.version
        await pool.close()

    with serving(tmp_path, "lookup", "--sandbox", "unsafe-process", HOME=str(tmp_path)) as host:
        asyncio.run(play(host))
        host.send_signal(signal.SIGTERM)
        assert ended(host)[0] == 0


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("lookup", "--host", "0.0.0.0"), "give a --token"),
        (("lookup", "--token", "geheim"), "--token must be a reference"),
        (("lookup", "--token", "${env:NO_SUCH_TOKEN}"), "NO_SUCH_TOKEN"),
        (("lookup", "--args", '{"latency": 1}'), "latency_s"),
        (("lokup",), "did you mean 'lookup'"),
        (("guess", "--sandbox", "bubblewrap"), "leave --sandbox out"),
        (("openenv",), "openenv stands for servers of their own"),
        (("openenv", "--args", '{"version": "2"}'), "protocol: openenv"),
        (("lookup", "--registry", "."), "cannot be written: Is a directory"),
        (("lookup", "--registry", "/dev/null/hosts.json"), "--registry /dev/null/hosts.json cannot be written"),
        (("lookup", "--registry", "/proc/hosts.json"), "--registry /proc/hosts.json cannot be written"),
        (("lookup", "--sandbox", '{"mode": "jail"}'), "--sandbox mode"),
    ],
)
def test_wrong_usage_is_told_before_it_listens(args, told, tmp_path):
    code, out, err = run(tmp_path, "env", "serve", *args, timeout_s=60)
    assert (code, out) == (2, "")
    assert told in err
    assert "Traceback" not in err


def test_a_registry_that_is_gone_does_not_stop_a_drain(world):
    async def play(host):
        pool = pool_of(host)
        session = pool.session(GroupVersion(), 20.0)
        await session.reset(TASK, 0)
        (world / "hosts.json").write_text("{")
        host.send_signal(signal.SIGTERM)
        other = pool.session(GroupVersion(), 2.0)
        with pytest.raises(HostAway, match="draining"):
            await other.reset(TASK, 0)
        assert (await session.step(say("end"), "k")).terminated
        await session.close()
        await pool.close()

    with serving(world, "world.py:World", "--registry", "hosts.json") as host:
        asyncio.run(play(host))
        out, err = host.communicate(timeout=20)
        assert (host.returncode, json.loads(out)["cancelled"]) == (0, 0)
        assert "stays in the registry" in err
        assert "Traceback" not in err
