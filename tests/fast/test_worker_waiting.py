"""What a worker does while it waits: for the ledger's server, for room, for a version (P19, cases Q14 and Q23)."""

import asyncio

import pytest
from episode_kit import DONE, World, ends, says
from worker_kit import SIZE, Bench, no_task_left

from headrace.platform.errors import LedgerAway
from headrace.platform.ledger.memory import MemoryLedger
from headrace.platform.testing.fakes.engine import ScriptedEngine


class Reachable(MemoryLedger):
    """A ledger whose server is away while `away` is set, and which takes no puts while `open` is not."""

    def __init__(self, *args):
        super().__init__(*args)
        self.away = False
        self.refused_calls = []
        self.open = asyncio.Event()
        self.open.set()
        self.most_waiting = self.waiting = 0

    def _reach(self, call):
        if self.away:
            self.refused_calls.append(call)
            raise LedgerAway("connection refused")

    async def admit(self, version, size, groups, holder):
        self._reach("admit")
        return await super().admit(version, size, groups, holder)

    async def renew(self, holder, groups):
        self._reach("renew")
        return await super().renew(holder, groups)

    async def put(self, submissions):
        self._reach("put")
        await self.open.wait()
        return await super().put(submissions)


@pytest.fixture
def bench(tmp_path, monkeypatch):
    def make(world=lambda n: World(), **options):
        return Bench(tmp_path, monkeypatch, world, **{"ledger": Reachable, **options})

    return make


@pytest.fixture(autouse=True)
async def nothing_is_left_running():
    before = asyncio.all_tasks()
    yield
    await asyncio.sleep(0)
    assert not no_task_left(before)


def waits_for(b):
    return b.part.status().waiting_for


async def test_the_part_says_what_the_worker_does_and_waits_for(bench):
    free = asyncio.Event()

    async def step(message):
        await free.wait()
        return ends(1.0)

    b = bench(lambda n: World(step), engine=says(DONE, versions=()), max_episodes=9 * SIZE)
    await b.worker.start()
    await b.comes(lambda: waits_for(b) == "a version")
    b.engine = b.worker._player._generator = says(DONE)
    await b.comes(lambda: waits_for(b) == "the first version")
    await b.publish()
    await b.comes(lambda: waits_for(b) == "room in the queue (capacity)")
    assert b.part.status().state == f"playing {4 * SIZE} episodes"
    await b.publish(batches=2)
    await b.comes(lambda: waits_for(b) == "a version that is not stale")
    free.set()
    await b.worker.stop()
    assert (b.part.status().state, waits_for(b)) == ("stopped", "")
    await b.check_closed()


# case Q14
async def test_what_is_not_delivered_takes_a_place_so_that_nothing_floods(bench):
    """The ledger takes no puts: whatever has ended waits, and no more is begun than there are places for."""
    b = bench(max_episodes=2 * SIZE, limits={"batch_groups": 100})
    b.ledger.open.clear()
    await b.publish()
    await b.worker.start()
    await b.comes(lambda: sum(b.worker.stats().statuses.values()) == 2 * SIZE)
    polls = b.ledger._books.revision + 50
    await b.until(lambda stats: stats.revision > polls)
    assert (await b.ledger.stats()).dispatched == 2 * SIZE
    assert b.worker.stats().running == 0
    b.ledger.open.set()
    await b.until(lambda stats: stats.dispatched > 10 * SIZE)
    await b.worker.stop()
    await b.check_closed()


# case Q23
async def test_the_last_members_of_a_full_queue_are_put(bench):
    """P19: their room was reserved with their groups."""
    free = asyncio.Event()

    async def step(message):
        await free.wait()
        return ends(1.0)

    b = bench(lambda n: World(None if n % SIZE else step), max_episodes=8 * SIZE)
    await b.publish()
    await b.worker.start()
    await b.until(lambda stats: stats.groups_open == 4 and stats.score_count == 4 * (SIZE - 1))
    await b.comes(lambda: waits_for(b) == "room in the queue (capacity)")
    free.set()
    await b.until(lambda stats: stats.groups_ready == 4)
    await b.worker.stop()
    stats = await b.check_closed()
    assert stats.refused == {}


async def test_episodes_go_on_while_the_server_is_away_and_what_ended_is_put_afterwards(bench):
    turns = 0

    def reply(request):
        nonlocal turns
        turns += 1
        return DONE

    free = asyncio.Event()

    async def step(message):
        await free.wait()
        return ends(1.0)

    b = bench(lambda n: World(step), engine=ScriptedEngine(reply), patience_s=30.0)
    await b.publish()
    await b.worker.start()
    await b.until(lambda stats: stats.groups_open == 2)
    b.ledger.away = True
    await b.comes(lambda: waits_for(b) == "the ledger's server")
    free.set()
    await b.comes(lambda: "put" in b.ledger.refused_calls)
    assert b.worker.stats().statuses == {"OK": 2 * SIZE}
    assert (await b.ledger.stats()).score_count == 0
    b.ledger.away = False
    await b.until(lambda stats: stats.groups_ready == 4)
    await b.comes(lambda: waits_for(b) == "room in the queue (capacity)")
    assert b.said[0].startswith("waiting for the ledger: connection refused")
    assert b.said[1].startswith("the ledger is back")
    await b.worker.stop()
    stats = await b.check_closed()
    assert stats.score_count == 4 * SIZE
    assert turns == 4 * SIZE


async def test_when_the_patience_ends_the_worker_says_why(bench):
    b = bench(patience_s=0.05)
    await b.publish()
    await b.worker.start()
    await b.until(lambda stats: stats.groups_ready == 4)
    b.ledger.away = True
    with pytest.raises(LedgerAway, match=r"connection refused; waited 0\.\d s for the ledger"):
        await b.until(lambda stats: False)
    await b.worker.stop()


async def test_what_an_earlier_process_left_is_put_before_anything_is_admitted(bench):
    """P11: the worker was killed between outbox and put; nothing that it played is lost, nothing is put twice."""
    b = bench(limits={"batch_groups": 2, "max_lag": 0})
    await b.publish()
    (ticket,) = (await b.ledger.admit(0, SIZE, 1, b.worker.holder)).tickets
    attempts = b.worker._open(ticket, 0.0)
    played = [await b.worker._play_present(attempt_id) for attempt_id in attempts]
    encoded = [(each, b"payload") for each in played]
    b.worker._delivery._keep(encoded, ())
    calls = []

    class Watching(Reachable):
        async def admit(self, *args):
            calls.append("admit")
            return await super().admit(*args)

        async def put(self, submissions):
            calls.append("put")
            return await super().put(submissions)

    b.ledger.__class__ = Watching
    b.worker = b.another()
    await b.worker.start()
    await b.until(lambda stats: stats.groups_ready == 2)
    await b.worker.stop()
    assert calls[:2] == ["put", "admit"]
    stats = await b.check_closed()
    assert (stats.dispatched, stats.score_count, stats.refused) == (2 * SIZE, 2 * SIZE, {})


async def test_the_outbox_is_emptied_in_the_background(bench):
    b = bench()
    b.worker._confirmation._clock = lambda: 1e9  # long after every answer
    await b.publish()
    await b.worker.start()
    await b.until(lambda stats: stats.groups_ready == 4)
    await b.comes(lambda: len(b.worker._delivery.outbox) == 0)
    assert list((b.tmp_path / "outbox").iterdir()) == []
    assert b.worker.stats().durability == "confirmed"
    await b.worker.stop()
    await b.check_closed()
