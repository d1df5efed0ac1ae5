"""A host is killed while it plays: the run goes on elsewhere, and nothing is lost. Hosts are processes; no model."""

import asyncio
import contextlib
import json
import re
import time
import urllib.request

import pytest
from command_line import environment, start

from headrace import Message, Role
from headrace.actors.delivery import Delivery
from headrace.actors.outbox import Outbox
from headrace.actors.worker import RolloutWorker, WorkerSettings
from headrace.actors.worlds import Worlds
from headrace.platform.config.environments import EnvironmentConfig, SamplingConfig
from headrace.platform.config.pools import PoolConfig
from headrace.platform.ledger.memory import MemoryLedger
from headrace.platform.records import Status
from headrace.platform.records.delivery import CommitRequest, LedgerLimits
from headrace.platform.records.message import ToolCall
from headrace.platform.store.episodes import EpisodeStore
from headrace.platform.store.tables import RewardTable
from headrace.platform.testing.fakes.engine import ScriptedEngine
from headrace.platform.testing.fakes.renderer import CharRenderer

RUN, SIZE, GROUPS, AT_ONCE = "killed-run", 4, 8, 16
RENDERER = CharRenderer()


def reply(request):
    """Reads on from the last key that was named, and answers with the value."""
    key, value = re.findall(r"(?:find |=@)(k\d+)|k\d+=(v\d+)", RENDERER.decode(request.token_ids))[-1]
    message = Message(Role.ASSISTANT, value, tool_calls=() if value else (ToolCall("get", {"key": key}, "c"),))
    return RENDERER.render([message], ())[1:-1]


def worker_at(registry, folder, ledger):
    """A rollout worker whose episodes are played by the hosts of a registry."""
    pool = PoolConfig(source=str(registry))
    sampling = SamplingConfig(max_new_tokens=200)
    worlds = Worlds([EnvironmentConfig(name="lookup", pool=pool, sampling=sampling, reset_deadline_s=20)], "train", 0)
    engine = ScriptedEngine(reply)
    settings = WorkerSettings(
        run=RUN,
        worker_id="rollout-0",
        policy_id="scripted",
        group_size=SIZE,
        max_episodes=AT_ONCE,
        request_deadline_s=5.0,
        idle_s=0.01,
    )
    delivery = Delivery(
        ledger=ledger,
        store=EpisodeStore(str(folder)),
        rewards=RewardTable(str(folder), "rollout-0"),
        worker_id="rollout-0",
        outbox=Outbox(folder / "outbox", RUN),
    )
    newest = lambda: max(engine.versions(), default=None)  # noqa: E731
    return RolloutWorker(settings, worlds, RENDERER, engine, newest, delivery, lambda split: worlds), worlds


async def publish(ledger):
    fence = await ledger.acquire_learner("test")
    number = await ledger.stage(fence)
    await ledger.commit(CommitRequest(fence=fence, number=number, parent=-1, content_hash="h", batches=0, fates={}))


async def until(holds):
    """Wait for what other processes do."""
    async with asyncio.timeout(60):
        while not await holds():  # noqa: ASYNC110 - they set no event here
            await asyncio.sleep(0.01)


@contextlib.contextmanager
def serving(folder):
    """A host of slow lookups that lists itself in `hosts.json`, and its address."""
    args = ("lookup", "--args", '{"latency_s": 0.3}', "--registry", "hosts.json", "--capacity", "16", "--json")
    process = start(folder, "env", "serve", *args, env=environment())
    try:
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        yield process, json.loads(line)["address"]
    finally:
        process.kill()
        process.communicate()


async def sessions_at(address):
    """How many sessions a host says that it has."""

    def get():
        with urllib.request.urlopen(address.replace("ws://", "http://") + "/health", timeout=10) as page:
            return json.loads(page.read())["sessions"]

    return await asyncio.to_thread(get)


async def play(registry, folder, process, killed):
    """Kill a host while it plays; the books, and what the worker tells of its hosts, when every group is whole."""
    ledger = MemoryLedger(
        RUN, LedgerLimits(batch_groups=GROUPS // 2, max_lag=1, drop_zero_variance=False), time.monotonic
    )
    worker, worlds = worker_at(registry, folder, ledger)
    await publish(ledger)
    await worker.start()

    async def is_playing():
        has_played = (await ledger.stats()).groups_ready >= 1
        return has_played and await sessions_at(killed) >= SIZE

    async def is_done():
        return (await ledger.stats()).groups_ready == GROUPS

    await until(is_playing)
    process.kill()
    assert (await ledger.stats()).groups_ready < GROUPS
    await until(is_done)
    told = worlds.resources.hosts()
    await worker.stop()
    await worlds.resources.close()
    await ledger.stop("test")
    return await ledger.stats(), told


@pytest.mark.timeout(100)
def test_a_run_goes_on_when_a_host_is_killed_while_it_plays(tmp_path):  # case E13
    with serving(tmp_path) as (process, killed), serving(tmp_path) as (_, other):
        stats, told = asyncio.run(play(tmp_path / "hosts.json", tmp_path, process, killed))
    assert f"{killed} away" in told, "headrace status says so"
    episodes = list(EpisodeStore(str(tmp_path)).iterate())
    failed = [each for each in episodes if each.status is not Status.OK]
    assert len(failed) >= SIZE // 2
    for each in failed:  # played there, and nobody's fault but the infrastructure's
        assert (each.status, each.fault_owner) == (Status.ENV_TRANSIENT, "infrastructure")
        assert each.pool == killed
        again = next(e for e in episodes if e.attempt_id == each.attempt_id.next_attempt())
        assert (again.status, again.pool) == (Status.OK, other)
        assert (again.task, again.seed) == (each.task, each.seed)
    whole = [each for each in episodes if each.status is Status.OK]
    slots = {(each.attempt_id.group, each.attempt_id.sample) for each in whole}
    assert len(slots) == len(whole) >= GROUPS * SIZE
    assert {other} <= {each.pool for each in whole} <= {killed, other}
    assert stats.score_sum == stats.score_count == len(whole)
    # nothing is lost: what was dispatched has a fate, and what failed is what was stored as failed
    assert stats.holds
    assert stats.fates["in_flight"] == 0
    assert stats.fates["failed:infrastructure"] == len(failed)
    assert stats.dispatched == len(episodes)
