"""Which replica rolls, and when none may (P22); and replicas of one version that are told to."""

import asyncio
import contextlib

import pytest
from test_replica import FAST, Publisher, RecordingEngine, request

from headrace.platform.errors import PartDied
from headrace.platform.records import GenerationRequest, i32
from headrace.platform.records.status import UpdateMode
from headrace.serving.door.client import DoorClient
from headrace.serving.door.server import DoorServer
from headrace.serving.engine import EngineStats
from headrace.serving.replica import Replica
from headrace.serving.rolling import ReplicaState, Roll, leaving, next_roll
from headrace.serving.service import ReplicaService

WAIT_S = 10.0


def at(name, version, sessions=0, draining=False, held=()):
    versions = () if version < 0 else (version,)
    return ReplicaState(name=name, versions=versions, sessions=sessions, is_draining=draining, held=frozenset(held))


def decide(*replicas, newest=5, wanted=(), drain=False, follows=True):
    return next_roll(replicas, newest=newest, wanted=wanted, drain_allowed=drain, follows=follows)


# --- the decision (P22) -----------------------------------------------------------------------------------------------


def test_the_one_with_the_least_work_rolls_first():
    assert decide(at("a", 3, 7), at("b", 3, 2), at("c", 4, 2)) == Roll(replica="b", version=5)


def test_one_at_a_time():
    assert decide(at("a", 3), at("b", 4, draining=True)) == "b is rolling"


def test_intermediate_versions_are_skipped():
    assert decide(at("a", 0), at("b", 5), newest=9) == Roll(replica="a", version=9)


def test_whoever_has_the_newest_is_left_alone():
    assert decide(at("a", 5), at("b", 5)) == "every replica holds what it should"
    assert decide(newest=-1) == "every replica holds what it should"


def test_an_empty_replica_is_not_told_and_is_not_open():
    assert decide(at("a", -1), at("b", 5)) == "every replica holds what it should"
    assert "only one that is open" in decide(at("a", -1), at("b", 3))


def test_the_last_open_replica_drains_only_where_it_is_allowed():
    assert "draining is forbidden" in decide(at("a", 3))
    assert decide(at("a", 3), drain=True) == Roll(replica="a", version=5)


def test_a_replica_that_an_evaluation_holds_keeps_its_version():
    held = at("a", 3, 0, held=[3])
    assert decide(held, at("b", 3, 9), wanted=[3]) == Roll(replica="b", version=5)
    assert "held to another" in decide(held, at("b", 5), wanted=[3])


def test_an_evaluation_takes_a_replica_that_has_its_version_or_has_it_rolled_to():
    assert decide(at("a", 3, 9), at("b", 4), wanted=[3]) == Roll(replica="a", version=3, hold=True)
    assert decide(at("a", 5, 9), at("b", 5, 2), wanted=[3]) == Roll(replica="b", version=3, hold=True)
    assert "only one that is open" in decide(at("a", 5), wanted=[3])
    assert decide(at("a", 5), wanted=[3], drain=True) == Roll(replica="a", version=3, hold=True)
    assert decide(at("a", 5), at("b", 4, draining=True), wanted=[3]) == "b is rolling"


def test_two_evaluations_need_two_replicas():
    one = at("a", 3, held=[3])
    assert decide(one, at("b", 5), wanted=[3, 4]) == Roll(replica="b", version=4, hold=True)
    assert "held to another" in decide(one, wanted=[3, 4], drain=True)


def test_replicas_that_follow_by_themselves_are_told_only_what_an_evaluation_needs():
    assert decide(at("a", 3), at("b", 3), follows=False) == "every replica holds what it should"
    assert decide(at("a", 3), at("b", 4), wanted=[3], follows=False) == Roll(replica="a", version=3, hold=True)


def test_a_pool_shrinks_by_what_it_misses_least():
    assert leaving([at("a", 5, 1), at("b", 5, 4)], 1) == ["a"]
    assert leaving([at("a", 5), at("b", 5)], 1) == ["b"], "the last one, if nothing else decides"
    assert leaving([at("a", 4, 0), at("b", 5, 9), at("c", 5, 9)], 1) == ["c"], "a holds version 4 alone"
    assert leaving([at("a", 5, 0, held=[5]), at("b", 5, 9)], 1) == ["b"]
    assert leaving([at("a", 5, 3), at("b", 5, 2), at("c", 5, 1)], 2) == ["c", "b"]


# --- replicas that hold one version -----------------------------------------------------------------------------------


class SingleEngine(RecordingEngine):
    """Holds one version: a load takes the place of what was there. Dies when it is told."""

    def __init__(self):
        super().__init__()
        self.why = asyncio.get_running_loop().create_future()

    @property
    def capacity(self):
        return 1

    async def load(self, manifest, path):
        before = list(self.versions())
        await super().load(manifest, path)
        for version in before:
            await self.retire(version)

    def stats(self):
        return EngineStats(sampled_tokens=0, prefilled_tokens=0, reused_tokens=0, running=0, waiting=0)

    def busy_intervals(self, since):
        return []

    async def wait_dead(self):
        return await asyncio.shield(self.why)


class Gate:
    """A gate whose sessions are what a test says."""

    def __init__(self):
        self.sessions = 0
        self.log = []

    def drain(self, grace_s):
        self.log.append("drain")

    def reopen(self):
        self.log.append("reopen")


class Following:
    """A replica under way, as a context."""

    def __init__(self, publisher, **options):
        self.engine, self.gate, self.changes = SingleEngine(), Gate(), asyncio.Queue()
        settings = {**FAST, "gate": self.gate, "drain_grace_s": 0.0, **options}
        self.replica = Replica(self.engine, "r0", **settings)
        self._registry = publisher.registry

    async def __aenter__(self):
        following = self.replica.follow(self._registry, 1, lambda: self.changes.put_nowait(self.held))
        self._task = asyncio.ensure_future(following)
        return self

    async def __aexit__(self, *exc):
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    @property
    def held(self):
        return list(self.engine.versions())

    async def changed(self):
        return await asyncio.wait_for(self.changes.get(), WAIT_S)

    async def until(self, condition):
        async with asyncio.timeout(WAIT_S):
            while not condition():  # noqa: ASYNC110 - the replica polls, and tells nobody
                await asyncio.sleep(0.005)


@pytest.fixture
async def publisher():
    return Publisher()


async def test_a_sticky_replica_waits_to_be_told(publisher):  # P22
    await publisher.publish()
    async with Following(publisher) as following:
        assert await following.changed() == [0]
        for _ in range(3):
            await publisher.publish()
        await following.until(lambda: following.replica.newest == 3)
        assert (following.held, following.engine.loads, following.gate.log) == ([0], [0], [])
        following.replica.roll(2, drain_deadline_s=WAIT_S)
        assert await following.changed() == [3], "the newest by then, whatever it was told"
        assert following.engine.loads == [0, 3]
        await following.until(lambda: not following.replica.is_rolling)
        assert following.gate.log == ["drain", "reopen"]
        assert await publisher.registry.retain([], newest=0) == [0, 1, 2], "only what it holds is pinned"


async def test_a_roll_waits_for_the_last_session(publisher):  # P22, case S1
    await publisher.publish()
    async with Following(publisher) as following:
        await following.changed()
        await publisher.publish()
        following.gate.sessions = 1
        following.replica.roll(1, drain_deadline_s=WAIT_S)
        await following.until(lambda: following.gate.log == ["drain"])
        assert following.held == [0]
        await following.engine.generate(request("s", 0))
        following.gate.sessions = 0
        assert await following.changed() == [1]


async def test_a_session_that_never_ends_does_not_hold_a_roll_for_ever(publisher, caplog):  # P23
    await publisher.publish()
    async with Following(publisher) as following:
        await following.changed()
        await publisher.publish()
        following.gate.sessions = 1
        following.replica.roll(1, drain_deadline_s=0.05)
        assert await following.changed() == [1]
    assert "1 sessions did not end within 0.05 s" in caplog.text


async def test_a_roll_that_fails_leaves_the_old_version_in_service(publisher):  # case S4
    await publisher.publish()
    async with Following(publisher) as following:
        await following.changed()
        await publisher.publish()
        following.engine.fail = 1
        following.replica.roll(1, drain_deadline_s=WAIT_S)
        await following.until(lambda: following.gate.log == ["drain", "reopen"])
        assert (following.held, following.replica.failures, following.replica.is_rolling) == ([0], 1, False)
        following.replica.roll(1, drain_deadline_s=WAIT_S)
        assert await following.changed() == [1]


async def test_a_held_version_is_rolled_to_and_kept(publisher):
    for _ in range(2):
        await publisher.publish()
    async with Following(publisher, update_mode=UpdateMode.TURN) as following:
        assert await following.changed() == [1]
        following.replica.roll(0, hold=True, drain_deadline_s=WAIT_S)
        assert await following.changed() == [0]
        await publisher.publish()
        await following.until(lambda: following.replica.newest == 2)
        assert following.held == [0]
        following.replica.held.discard(0)
        assert await following.changed() == [2]
        assert following.engine.loads == [1, 0, 2]


@pytest.mark.parametrize("mode", [UpdateMode.TURN, UpdateMode.INFLIGHT])
async def test_in_other_modes_each_newest_version_is_taken_up_at_once(publisher, mode):
    await publisher.publish()
    async with Following(publisher, update_mode=mode) as following:
        await following.changed()
        await following.engine.generate(request("s", 0))
        following.gate.sessions = 1
        await publisher.publish()
        assert await following.changed() == [1]
        assert following.gate.log == [], "without draining"


class Adapters(SingleEngine):
    """Holds two versions, and cannot take a third."""

    @property
    def capacity(self):
        return 2

    async def load(self, manifest, path):
        assert len(self.versions()) < 2
        await RecordingEngine.load(self, manifest, path)


async def test_a_full_engine_gives_up_no_version_that_a_session_uses(publisher):  # P22
    await publisher.publish()
    following = Following(publisher)
    following.engine = following.replica.engine = Adapters()
    async with following:
        assert await following.changed() == [0]
        await following.engine.generate(request("s", 0))
        await publisher.publish()
        assert await following.changed() == [0, 1]
        await following.engine.generate(request("t", 1))
        await publisher.publish()
        await following.until(lambda: following.replica.newest == 2)
        assert following.held == [0, 1]
        await following.engine.release("s")
        await following.until(lambda: following.held == [1, 2])


# --- the service ------------------------------------------------------------------------------------------------------


async def a_service(publisher, engine, closed):
    async def closing():
        closed.append(True)

    door = DoorServer(engine, "token", "r0", grace_s=60.0)
    service = ReplicaService(engine, "r0", door, publisher.registry, 1, closing, drain_grace_s=0.0)
    return service, await service.start()


async def test_a_replica_whose_engine_dies_is_over_at_once(publisher):  # case S5
    await publisher.publish()
    engine, closed = SingleEngine(), []
    service, address = await a_service(publisher, engine, closed)
    client = await DoorClient.connect(*address, "token")
    assert service.stats().capacity == 1
    engine.why.set_result("out of memory")
    await asyncio.wait_for(client.closed.wait(), 2.0)
    assert client.retried == 0
    with pytest.raises(PartDied, match="out of memory"):
        service.stats()
    await service.close()
    assert closed == [True]


async def test_a_replica_that_leaves_finishes_its_sessions_and_does_not_come_back(publisher):
    await publisher.publish()
    engine = SingleEngine()
    service, address = await a_service(publisher, engine, [])
    client = await DoorClient.connect(*address, "token")
    told = asyncio.Event()
    client.on_versions = told.set
    async with asyncio.timeout(WAIT_S):
        while not client.versions():
            await told.wait()
            told.clear()
    await client.generate(a_turn("s"))
    service.leave()
    service.roll(0, True, WAIT_S)
    stats = service.stats()
    assert (stats.sessions, stats.is_draining, stats.held, stats.newest) == (1, True, (), 0)
    await client.generate(a_turn("s"))
    await client.release("s")
    async with asyncio.timeout(WAIT_S):
        while service.stats().sessions:  # noqa: ASYNC110 - the release is on its way
            await asyncio.sleep(0.005)
    await client.close()
    await service.close()


async def test_whoever_asks_sees_at_once_that_a_replica_is_to_roll(publisher):  # P22: one at a time
    await publisher.publish()
    engine = SingleEngine()
    service, _ = await a_service(publisher, engine, [])
    async with asyncio.timeout(WAIT_S):
        while not engine.versions():  # noqa: ASYNC110 - the replica polls
            await asyncio.sleep(0.005)
    assert not service.stats().is_draining
    service.roll(await publisher.publish(), False, WAIT_S)
    assert service.stats().is_draining
    async with asyncio.timeout(WAIT_S):
        while service.stats().is_draining:  # noqa: ASYNC110 - the replica polls
            await asyncio.sleep(0.005)
    assert service.stats().versions == (1,)
    await service.close()


class Carrying(SingleEngine):
    """Finishes its second load, whatever becomes of the caller."""

    async def load(self, manifest, path):
        is_late = bool(self.loads)
        with contextlib.suppress(asyncio.CancelledError):
            if is_late:
                await asyncio.Event().wait()
        await super().load(manifest, path)
        if is_late:
            raise asyncio.CancelledError


async def test_what_an_engine_has_taken_up_too_late_is_pinned_all_the_same(publisher):  # P12, case Q17
    await publisher.publish()
    following = Following(publisher, control_deadline_s=0.1)
    following.engine = following.replica.engine = Carrying()
    async with following:
        await following.changed()
        await publisher.publish()
        following.replica.roll(1, drain_deadline_s=WAIT_S)
        assert await following.changed() == [1]
        assert "took over 0.1 s" in following.replica.last_failure
        assert await publisher.registry.retain([], newest=0) == [0]


def a_turn(session):
    return GenerationRequest(f"{session}/0", session, i32([1]), 0, 0)
