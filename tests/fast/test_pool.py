"""The pool routes by session, version and load, and survives replicas that come and go."""

import asyncio
import contextlib

import pytest

from headrace.platform.errors import DeadlineExceeded, EngineDead, EngineError, VersionUnavailable
from headrace.platform.records import FinishReason, Generation, GenerationRequest, UpdateMode, f32, i32
from headrace.serving.door.client import DoorClient
from headrace.serving.door.server import DoorServer
from headrace.serving.pool import Pool

WAIT_S = 10.0


def a_request(session, version=1, mode=UpdateMode.STICKY, deadline_s=60.0):
    key = f"key-{session}"
    return GenerationRequest(key, session, i32([1]), version, 0, deadline_s=deadline_s, update_mode=mode)


class Member:
    """A replica's client whose requests wait while `gate` is closed."""

    def __init__(self, replica, *versions):
        self.replica = replica
        self.held = list(versions)
        self.is_draining = False
        self.is_connected = True
        self.retried = 0
        self.on_versions = None
        self.on_closed = None
        self.closed = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()
        self.error = None
        self.served = []
        self.requests = []
        self.released = []

    async def generate(self, request):
        self.served.append(request.session)
        self.requests.append(request)
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return Generation(i32([2]), f32([-1.0]), FinishReason.STOP, (), self.replica)

    async def release(self, session):
        self.released.append(session)

    def versions(self):
        return self.held

    async def close(self):
        self.die()

    def announce(self, *versions):
        self.held = list(versions)
        if self.on_versions is not None:
            self.on_versions()

    def die(self):
        self.held = []
        self.closed.set()
        if self.on_closed is not None:
            self.on_closed()


def a_pool(*members):
    pool = Pool()
    for member in members:
        pool.add(member)
    return pool


async def within(awaitable):
    return await asyncio.wait_for(awaitable, WAIT_S)


async def asked(pool, *sessions, version=1):
    """Start requests and let them reach their replicas."""
    calls = [asyncio.ensure_future(pool.generate(a_request(session, version))) for session in sessions]
    await asyncio.sleep(0)
    return calls


async def test_new_sessions_go_to_the_least_loaded():
    a, b = Member("a", 1), Member("b", 1)
    pool = a_pool(a, b)
    for member in (a, b):
        member.gate.clear()
    calls = await asked(pool, *"stuvwx")
    assert pool.in_flight == {"a": 3, "b": 3}
    b.gate.set()
    await within(asyncio.gather(*(call for call, s in zip(calls, "stuvwx", strict=True) if s in b.served)))
    assert pool.in_flight == {"a": 3, "b": 0}
    b.gate.clear()
    more = await asked(pool, "y", "z")
    assert pool.in_flight == {"a": 3, "b": 2}
    for member in (a, b):
        member.gate.set()
    await within(asyncio.gather(*calls, *more))
    assert pool.in_flight == {"a": 0, "b": 0}


async def test_a_session_stays_where_its_cache_is():
    a, b = Member("a", 1), Member("b", 1)
    pool = a_pool(a, b)
    homes = {}
    for turn in range(3):
        for session in "stuv":
            replica = (await within(pool.generate(a_request(session)))).replica
            assert homes.setdefault(session, replica) == replica, (session, turn)
    assert sorted(homes.values()) == ["a", "a", "b", "b"]


async def test_a_session_moves_when_its_replica_no_longer_holds_the_version():
    a, b = Member("a", 1), Member("b")
    pool = a_pool(a, b)
    assert (await within(pool.generate(a_request("s")))).replica == "a"
    a.announce(2)
    b.announce(1)
    assert (await within(pool.generate(a_request("s")))).replica == "b"
    a.announce(1, 2)
    assert (await within(pool.generate(a_request("s")))).replica == "b"
    assert (a.released, b.released) == (["s"], []), "a keeps nothing for a session that has left"


async def test_release_goes_to_the_sessions_replica_once():  # P19
    a, b = Member("a", 1), Member("b", 1)
    pool = a_pool(a, b)
    await within(pool.generate(a_request("s")))
    for session in ("s", "s", "unknown"):
        await pool.release(session)
    assert (a.released, b.released) == (["s"], [])


async def test_only_replicas_that_hold_the_version_are_asked():
    a, b = Member("a", 1), Member("b", 1, 2)
    pool = a_pool(a, b)
    for session in "stu":
        assert (await within(pool.generate(a_request(session, version=2)))).replica == "b"
    assert a.served == []


async def test_a_version_that_nobody_holds_is_unavailable():  # P23
    pool = a_pool(Member("a", 1), Member("b", 2))
    with pytest.raises(VersionUnavailable, match=r"none of 2 replicas holds version 3; held: \[1, 2\]"):
        await within(pool.generate(a_request("s", version=3)))
    with pytest.raises(VersionUnavailable, match="none of 0 replicas"):
        await within(Pool().generate(a_request("s")))


async def test_a_lost_replica_leaves_and_its_sessions_move():
    a, b = Member("a", 1, 2), Member("b", 1)
    pool = a_pool(a, b)
    assert (await within(pool.generate(a_request("s")))).replica == "a"
    assert list(pool.versions()) == [1, 2]
    a.die()
    assert pool.in_flight == {"b": 0}
    assert list(pool.versions()) == [1]
    assert (await within(pool.generate(a_request("s")))).replica == "b"
    b.die()
    with pytest.raises(VersionUnavailable):
        await within(pool.generate(a_request("s")))


async def test_a_replica_whose_engine_is_dead_leaves_and_one_with_an_error_stays():
    a, b = Member("a", 1), Member("b", 1)
    pool = a_pool(a, b)
    a.error, b.error = EngineDead("core gone"), EngineError("out of memory")
    with pytest.raises(EngineError, match="out of memory"):
        await within(pool.generate(a_request("s")))
    assert (a.served, b.served) == (["s"], ["s"])
    assert pool.in_flight == {"b": 0}


async def test_a_replica_that_is_out_of_reach_comes_back():
    a, b = Member("a", 1), Member("b", 1)
    pool = a_pool(a, b)
    a.error, a.is_connected = EngineDead("not reached"), False
    a.announce(1)
    b.gate.clear()
    waiting = await asked(pool, "t", "u")
    a.is_connected = True
    a.announce(1)
    a.gate.clear()
    waiting += await asked(pool, "s")
    assert a.served == ["s"]
    a.is_connected = False
    a.announce()
    a.gate.set()
    b.gate.set()
    assert [answer.replica for answer in await within(asyncio.gather(*waiting))] == ["b", "b", "b"]
    a.error, a.is_connected = None, True
    a.announce(2)
    assert pool.newest_version() == 2
    assert (await within(pool.generate(a_request("v", 2)))).replica == "a"


# --- replicas that die, drain and move on (P22, P24) ------------------------------------------------------------------


class Ticking:
    """A clock that a test sets."""

    now_s = 0.0

    def __call__(self):
        return self.now_s


async def test_a_turn_whose_replica_dies_is_sampled_again_elsewhere():  # P24, case S5
    clock = Ticking()
    a, b = Member("a", 1), Member("b", 1)
    pool = Pool(clock)
    pool.add(a)
    pool.add(b)
    a.gate.clear()
    a.error = EngineDead("core gone")
    (call,) = await asked(pool, "s")
    clock.now_s = 20.0
    a.gate.set()
    assert (await within(call)).replica == "b"
    (again,) = b.requests
    assert (again.key, again.version, again.deadline_s) == ("key-s", 1, 40.0), "the deadline is that of the caller"
    assert pool.stats().resampled == 1
    assert (await within(pool.generate(a_request("s")))).replica == "b"


async def test_without_another_replica_of_its_version_the_turn_fails():  # case S5
    a, b = Member("a", 1), Member("b", 2)
    pool = a_pool(a, b)
    a.error = EngineDead("core gone")
    with pytest.raises(EngineDead, match="core gone"):
        await within(pool.generate(a_request("s")))
    assert (b.served, pool.stats().resampled) == ([], 0)
    with pytest.raises(VersionUnavailable):  # P23
        await within(pool.generate(a_request("s")))


async def test_nothing_is_sampled_again_after_the_deadline():
    clock = Ticking()
    a, b = Member("a", 1), Member("b", 1)
    pool = Pool(clock)
    pool.add(a)
    pool.add(b)
    a.gate.clear()
    a.error = EngineDead("core gone")
    (call,) = await asked(pool, "s")
    clock.now_s = 60.0
    a.gate.set()
    with pytest.raises(EngineDead):
        await within(call)
    assert b.served == []


@pytest.mark.parametrize("mode", [UpdateMode.TURN, UpdateMode.INFLIGHT])
async def test_other_modes_stay_at_home_and_take_what_is_new_enough(mode):  # P22
    a, b = Member("a", 1), Member("b", 3)
    pool = a_pool(a, b)
    assert (await within(pool.generate(a_request("s", 1, mode)))).replica == "a"
    a.announce(2)
    assert (await within(pool.generate(a_request("s", 1, mode)))).replica == "a"
    assert (await within(pool.generate(a_request("s", 3, mode)))).replica == "b", "versions never go back"
    assert (a.released, b.released) == (["s"], [])
    with pytest.raises(VersionUnavailable):
        await within(pool.generate(a_request("s", 4, mode)))


async def test_a_replica_that_drains_keeps_its_sessions_and_gets_no_new_ones():  # P22
    a, b = Member("a", 1), Member("b", 1)
    pool = a_pool(a, b)
    assert (await within(pool.generate(a_request("s")))).replica == "a"
    a.is_draining = True
    a.announce(1)
    for session in "tuv":
        assert (await within(pool.generate(a_request(session)))).replica == "b"
    assert (await within(pool.generate(a_request("s")))).replica == "a"
    b.die()
    assert (await within(pool.generate(a_request("late")))).replica == "a", "it may still be in the grace"
    assert pool.newest_version() is None, "nothing new is admitted"
    a.is_draining = False
    a.announce(2)
    assert pool.newest_version() == 2


async def test_a_session_that_a_replica_refuses_is_asked_for_elsewhere():
    """Its door has begun to drain, and the pool does not know yet."""
    a, b = Member("a", 1), Member("b", 1)
    pool = a_pool(a, b)
    a.error = VersionUnavailable("it drains")
    assert (await within(pool.generate(a_request("s")))).replica == "b"
    assert pool.in_flight == {"a": 0, "b": 0}
    assert pool.stats().resampled == 0, "nothing was sampled"
    b.error = VersionUnavailable("so does this")
    with pytest.raises(VersionUnavailable):
        await within(pool.generate(a_request("t")))


async def test_load_and_health_are_known():
    a, b = Member("a", 1, 2), Member("b")
    pool = a_pool(a, b)
    a.gate.clear()
    (call,) = await asked(pool, "s")
    a.is_connected, a.retried, b.is_draining = False, 3, True
    a.announce(1, 2)
    b.announce()
    first, second = pool.stats().members
    assert (first.replica, first.versions, first.in_flight, first.sessions) == ("a", (1, 2), 1, 1)
    assert (first.is_connected, first.is_draining) == (False, False)
    assert (second.replica, second.versions, second.is_connected, second.is_draining) == ("b", (), True, True)
    a.gate.set()
    await within(call)
    a.die()
    assert pool.stats().retried == 3, "what a member counted stays counted"


async def test_a_connection_that_is_tried_again_gets_no_new_sessions():
    a, b = Member("a", 1), Member("b", 1)
    pool = a_pool(a, b)
    a.is_connected = False
    a.announce(1)
    for session in "st":
        assert (await within(pool.generate(a_request(session)))).replica == "b"


async def test_cancelled_requests_are_no_longer_in_flight():
    a = Member("a", 1)
    a.gate.clear()
    pool = a_pool(a)
    (call,) = await asked(pool, "s")
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await call
    assert pool.in_flight == {"a": 0}


async def test_replicas_are_added_and_removed_while_requests_run():
    a, b = Member("a", 1), Member("b", 1)
    pool = a_pool(a)
    a.gate.clear()
    (call,) = await asked(pool, "s")
    pool.add(b)
    assert pool.remove("a") is a
    assert (await within(pool.generate(a_request("s")))).replica == "b"
    a.gate.set()
    assert (await within(call)).replica == "a"
    with pytest.raises(ValueError, match="already in the pool"):
        pool.add(Member("b", 1))
    dead = Member("c", 1)
    dead.closed.set()
    with pytest.raises(EngineDead):
        pool.add(dead)


@pytest.mark.parametrize("name", ["a", "a-2"])
async def test_a_replica_that_was_started_anew_takes_the_place_of_the_old_one(name):
    old, b, new = Member("a", 1), Member("b", 1), Member(name, 1)
    pool = a_pool(old, b)
    assert (await within(pool.generate(a_request("s")))).replica == "a"
    assert pool.replace("a", new) is old
    assert pool.in_flight.keys() == {"b", name}
    answers = await within(asyncio.gather(*(pool.generate(a_request(session)) for session in "stuv")))
    assert {answer.replica for answer in answers} == {"b", name}
    assert old.served == ["s"]
    old.die()
    assert pool.in_flight.keys() == {"b", name}, "what becomes of the old one is nobody's business any more"
    new.die()
    newest = Member("a", 1)
    assert pool.replace(name, newest) is None, "the pool had noticed its end"
    assert pool.in_flight.keys() == {"b", "a"}


async def test_a_replacement_that_is_refused_changes_nothing():
    a, b, dead = Member("a", 1), Member("b", 1), Member("a", 1)
    dead.closed.set()
    pool = a_pool(a, b)
    with pytest.raises(ValueError, match="already in the pool"):
        pool.replace("a", Member("b", 1))
    for refused in (dead, Member("c", 1)):
        refused.closed.set()
        with pytest.raises((EngineDead, ValueError)):
            pool.replace("a", refused)
    assert pool.in_flight.keys() == {"a", "b"}


async def test_the_newest_version_is_the_newest_that_any_replica_holds():  # P22
    a, b = Member("a"), Member("b")
    pool = a_pool(a, b)
    assert pool.newest_version() is None
    a.announce(3)
    b.announce(4, 5)
    assert pool.newest_version() == 5
    b.announce(4)
    assert pool.newest_version() == 4


async def test_waiting_for_a_version():
    a = Member("a", 1)
    pool = a_pool(a)
    assert await pool.wait_version(1, timeout_s=WAIT_S) == 1
    waiters = [asyncio.ensure_future(pool.wait_version(3, timeout_s=WAIT_S)) for _ in range(2)]
    await asyncio.sleep(0)
    a.announce(2)
    a.announce(2, 4)
    assert await within(asyncio.gather(*waiters)) == [4, 4]
    with pytest.raises(DeadlineExceeded, match=r"version 9 or newer within 0\.02 s; held: \[2, 4\]"):
        await pool.wait_version(9, timeout_s=0.02)


async def test_a_new_replica_ends_the_wait():
    pool = Pool()
    waiter = asyncio.ensure_future(pool.wait_version(1, timeout_s=WAIT_S))
    await asyncio.sleep(0)
    pool.add(Member("a", 1))
    assert await within(waiter) == 1


async def test_over_real_doors():
    class Engine:
        def __init__(self):
            self.held = [1]

        async def generate(self, request):
            return Generation(i32([2]), f32([-1.0]), FinishReason.STOP, ())

        async def release(self, session):
            return None

        def versions(self):
            return self.held

    engines = [Engine(), Engine()]
    servers = [DoorServer(engine, "token", f"replica-{n}") for n, engine in enumerate(engines)]
    pool = Pool()
    for server in servers:
        pool.add(await DoorClient.connect(*await server.start(), "token"))
    await within(asyncio.gather(*(pool.generate(a_request(f"s{n}")) for n in range(50))))
    engines[1].held = [1, 2]
    servers[1].announce_versions()
    assert await pool.wait_version(2, timeout_s=WAIT_S) == 2
    lost = asyncio.Event()
    client = pool.remove("replica-1")
    pool.add(client)
    inner = client.on_closed
    client.on_closed = lambda: (inner(), lost.set())
    await servers[1].close()
    await within(lost.wait())
    assert list(pool.versions()) == [1]
    await within(pool.generate(a_request("s1")))
    await pool.close()
    await servers[0].close()
    assert pool.in_flight == {}
