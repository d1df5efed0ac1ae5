"""A worker that is stopped anywhere leaves nothing behind, and holds what it holds in one order (P19, P21, case X4)."""

import asyncio
import random

import pytest
from episode_kit import DONE, World, ends, goes_on, never
from worker_kit import SIZE, Bench, no_task_left

from headrace.platform.ledger.memory import MemoryLedger
from headrace.platform.records import RewardComponent, RewardKind
from headrace.platform.records.delivery import Verdict
from headrace.platform.testing.fakes.engine import ScriptedEngine


class Slow(MemoryLedger):
    """A server: the step is done some time before its reply is there."""

    dice = random.Random(0)

    async def _away(self):
        for _ in range(self.dice.randrange(4)):
            await asyncio.sleep(0)

    async def admit(self, version, size, groups, holder):
        await self._away()
        admission = await super().admit(version, size, groups, holder)
        await self._away()
        return admission

    async def put(self, submissions):
        await self._away()
        replies = await super().put(submissions)
        await self._away()
        return replies


class Strolling(World):
    """A world that takes a few rounds of the event loop for everything, sometimes goes on, and sometimes breaks."""

    def __init__(self, dice):
        super().__init__()
        self.dice = dice

    async def _stroll(self):
        for _ in range(self.dice.randrange(4)):
            await asyncio.sleep(0)

    async def reset(self, task, seed):
        observation = await super().reset(task, seed)
        await self._stroll()
        return observation

    async def step(self, message, key):
        await self._stroll()
        if self.dice.random() < 0.1:
            raise OSError("lost its sandbox")
        return goes_on() if self.dice.random() < 0.3 else ends(self.dice.random())

    async def close(self):
        await self._stroll()
        self.closed += 1


class StrollingEngine(ScriptedEngine):
    """Takes a few rounds for a generation, and for a release, too."""

    dice = random.Random(1)

    async def generate(self, request):
        generation = await super().generate(request)
        for _ in range(self.dice.randrange(4)):
            await asyncio.sleep(0)
        return generation

    async def release(self, session):
        await asyncio.sleep(0)
        await super().release(session)


@pytest.fixture(autouse=True)
async def nothing_is_left_running():
    before = asyncio.all_tasks()
    yield
    await asyncio.sleep(0)
    assert not no_task_left(before)


# case X4
@pytest.mark.parametrize("seed", range(4))
async def test_a_worker_stopped_at_any_await_leaves_nothing(tmp_path, monkeypatch, seed):
    """No session in the pool, no open world, no slot in flight at the ledger, whatever it was waiting for."""
    dice = random.Random(seed)
    for rounds in range(seed, 160, 16):
        b = Bench(
            tmp_path / str(rounds),
            monkeypatch,
            lambda n: Strolling(dice),
            engine=StrollingEngine(lambda _: DONE),
            ledger=Slow,
            renew_every_s=0.0005,
            confirm_every_s=0.0005,
        )
        await b.publish()
        await b.worker.start()
        for _ in range(rounds):
            await asyncio.sleep(0)
        await b.worker.stop()
        stats = await b.check_closed()
        assert b.worker._attempts.places == 0
        assert len(b.worker._delivery.outbox) == sum(stats.fates.values()), "all that was put is kept until confirmed"


async def test_a_group_that_is_just_being_given_out_is_taken_and_given_back(tmp_path, monkeypatch):
    granted, go_on = asyncio.Event(), asyncio.Event()

    class Granting(MemoryLedger):
        async def admit(self, version, size, groups, holder):
            admission = await super().admit(version, size, groups, holder)
            granted.set()
            await go_on.wait()
            return admission

    b = Bench(tmp_path, monkeypatch, lambda n: World(never), ledger=Granting)
    await b.publish()
    await b.worker.start()
    await granted.wait()
    stopping = asyncio.create_task(b.worker.stop())
    await asyncio.sleep(0)
    go_on.set()
    await stopping
    stats = await b.check_closed()
    assert stats.fates["cancelled:stopped"] == 2 * SIZE


# P19, P21
async def test_resources_are_taken_and_given_back_in_one_order(tmp_path, monkeypatch):
    """Admission, then the world, then the pin; pin and world are back before grading, outbox and put."""
    events = []

    class Watching(MemoryLedger):
        async def admit(self, *args):
            events.append("admit")
            return await super().admit(*args)

        async def put(self, submissions):
            events.append("put")
            replies = await super().put(submissions)
            assert all(reply.verdict is Verdict.ACCEPTED for reply in replies)
            return replies

    class Engine(ScriptedEngine):
        async def generate(self, request):
            events.append("pin")
            return await super().generate(request)

        async def release(self, session):
            events.append("unpin")
            await super().release(session)

    class Session(World):
        async def reset(self, task, seed):
            events.append("world")
            return await super().reset(task, seed)

        async def close(self):
            events.append("close")
            await super().close()

    class Grader:
        version = "1"

        async def score(self, task, episode):
            events.append("grade")
            return (RewardComponent(RewardKind.OUTCOME, 1.0),)

    b = Bench(
        tmp_path, monkeypatch, lambda n: Session(), engine=Engine(lambda _: DONE), ledger=Watching, scorer=Grader()
    )
    add = b.worker._delivery.outbox.add
    monkeypatch.setattr(b.worker._delivery.outbox, "add", lambda puts: events.append("outbox") or add(puts))
    await b.publish()
    await b.worker.play_round(1)
    first = [events.index(each) for each in ("admit", "world", "pin", "unpin", "close", "grade", "outbox", "put")]
    assert first == sorted(first)
    assert events.count("unpin") == events.count("close") == events.count("grade") == SIZE
    assert events.index("outbox") > max(n for n, event in enumerate(events) if event in ("unpin", "close", "grade"))
