"""How replicas are introduced to the workers, and leave, without Ray's processes."""

import asyncio
from collections import Counter
from types import SimpleNamespace

import pytest

from headrace.deploy.ray_launches import Launches
from headrace.deploy.supervision import Supervision
from headrace.platform.errors import DeadlineExceeded, PartDied
from headrace.serving.service import ReplicaStats

WAIT_S = 10.0


class Remote:
    def __init__(self, method):
        self.remote = method


class Actor:
    """A replica that answers with the sessions that a test says, one after the other, and with none in the end."""

    def __init__(self, *sessions):
        self.sessions = list(sessions)
        self.told = []
        self.dies = False
        self.start, self.stats = Remote(self._start), Remote(self._stats)
        self.leave, self.close = Remote(self._leave), Remote(self._close)
        self.hold, self.let_go = Remote(self._hold), Remote(self._let_go)

    async def _start(self, build):
        return "host", 7

    async def _stats(self):
        if self.dies:
            raise PartDied("out of memory")
        self.told.append("stats")
        counters = dict.fromkeys(("sampled_tokens", "prefilled_tokens", "reused_tokens", "running", "load_failures"), 0)
        sessions = self.sessions.pop(0) if self.sessions else 0
        return ReplicaStats(replica="replica-0", versions=(), sessions=sessions, **counters)

    async def _hold(self, version):
        self.told.append(f"hold {version}")

    async def _let_go(self, version):
        self.told.append(f"let go {version}")

    async def _leave(self):
        self.told.append("leave")

    async def _close(self):
        self.told.append("close")


class Part:
    """A part whose actor is at hand. A worker writes down which replicas it was told of; so often it reaches none."""

    def __init__(self, name, actor=None, unreachable=0):
        self.name, self.actor = name, actor
        self.unreachable, self.known = unreachable, []
        self.replace_replica = Remote(self._replace_replica)

    async def ask_now(self, what, call):
        return await call(self.actor or self)

    async def ask(self, what, call, *_):
        return await call(self.actor or self)

    async def close(self):
        self.actor.told.append("ended")

    async def _replace_replica(self, name, host, port):
        if self.unreachable:
            self.unreachable -= 1
            raise DeadlineExceeded("no handshake")
        self.known.append((name, host, port))


class Placement:
    async def add_replica(self, index):
        pass

    async def remove_replica(self, index):
        pass

    def options(self, name):
        return {}


def launches(*workers, deadline_s=WAIT_S, grace_s=0.0):
    made = Launches(Supervision(0, lambda kind, **detail: None))
    made._context = SimpleNamespace(config=SimpleNamespace(serving=SimpleNamespace(drain_grace_s=grace_s)))
    made._deadline_s, made._placement = deadline_s, Placement()
    made.workers = list(workers)
    made._holders = dict.fromkeys(range(len(workers)), "holder")
    return made


async def test_a_worker_that_did_not_reach_a_new_replica_is_told_again():  # case S6
    quick, slow = Part("rollout-0"), Part("rollout-1", unreachable=1)
    await asyncio.wait_for(launches(quick, slow)._bring_up_replica(0, Actor()), WAIT_S)
    assert quick.known == slow.known == [("replica-0", "host", 7)]


async def test_a_replica_that_dies_or_that_no_worker_reaches_has_not_come_up():
    with pytest.raises(PartDied, match=r"rollout-0 could not reach it for 0 s"):
        await launches(Part("rollout-0", unreachable=99), deadline_s=0.0)._introduce(
            Part("rollout-0", unreachable=99), "replica-0", ("host", 7), Actor()
        )
    dead = Actor()
    dead.dies = True
    with pytest.raises(PartDied, match="out of memory"):
        await launches()._introduce(Part("rollout-0", unreachable=1), "replica-0", ("host", 7), dead)


async def test_a_replica_that_joins_knows_of_evaluations_that_began_or_ended_meanwhile():
    made, actor = launches(), Actor()
    made.held = {3, 4}

    class Joining(Part):
        async def bring_up(self):
            made.held = {4, 5}

    made._make = lambda name, kind, bring_up, options: Joining(name, actor)
    assert await made.add_replica() == "replica-0"
    assert actor.told == ["let go 3", "hold 5"]


async def test_a_replica_leaves_after_its_last_session_and_those_on_their_way():  # P22
    actor = Actor(2, 1)
    made = launches(grace_s=0.05)
    made.replicas, made._indices = [Part("replica-0", actor)], {"replica-0": 0}
    seen = Counter()
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await made.remove_replica("replica-0", WAIT_S, lambda part, stats: seen.update([stats.sessions]))
    assert loop.time() - began_s >= 0.05
    assert actor.told == ["leave", "stats", "stats", "stats", "close", "ended"]
    assert seen == {2: 1, 1: 1, 0: 1}
    assert made.everyone == []
