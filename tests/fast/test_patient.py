"""A patient ledger: what a lost reply means for each call, and how long it waits (P2, P7, P8, P11)."""

import asyncio
import inspect
import itertools

import pytest

from headrace.platform.contracts import Ledger
from headrace.platform.errors import CommitRefused, DeadlineExceeded, Fenced, LedgerAway, LedgerError, LedgerRewound
from headrace.platform.ledger.memory import MemoryLedger
from headrace.platform.ledger.patient import PatientLedger
from headrace.platform.records.delivery import Verdict
from headrace.platform.testing.conformance.ledger_harness import LedgerHarness, limits, numbers

AWAY = LedgerAway("connection refused")
LATE = DeadlineExceeded("no answer")


class Shaky:
    """A ledger whose server goes away: `lost` drops the reply to a call, `refused` the call."""

    def __init__(self, ledger):
        self.ledger = ledger
        self.lost: list[Exception] = []
        self.refused: list[Exception] = []
        self.calls: list[str] = []

    def __getattr__(self, name):
        async def call(*arguments, **named):
            self.calls.append(name)
            if self.refused:
                raise self.refused.pop(0)
            reply = await getattr(self.ledger, name)(*arguments, **named)
            if self.lost:
                raise self.lost.pop(0)
            return reply

        return call


class World:
    def __init__(self, deadline_s=10.0, **chosen):
        self.now_s = 0.0
        self.pauses: list[float] = []
        self.said: list[str] = []
        ticks = itertools.count(1)
        self.inner = MemoryLedger("r", limits(max_lag=4, **chosen), lambda: float(next(ticks)))
        self.shaky = Shaky(self.inner)
        self.held: list[int] = []
        self.ledger = PatientLedger(
            self.shaky,
            deadline_s,
            self.said.append,
            held=lambda: self.held,
            clock=lambda: self.now_s,
            sleep=self.sleep,
        )
        self.h = LedgerHarness(ledger=self.inner, run="r", advance=None)

    async def sleep(self, seconds):
        self.pauses.append(seconds)
        self.now_s += seconds


@pytest.fixture
def world():
    return World()


def test_it_has_every_method_of_the_contract():
    methods = {name for name, _ in inspect.getmembers(Ledger, inspect.isfunction) if not name.startswith("_")}
    for name in methods:
        ours, theirs = getattr(PatientLedger, name), getattr(Ledger, name)
        assert inspect.signature(ours) == inspect.signature(theirs)


async def test_it_waits_with_growing_pauses_and_says_so_once(world):
    world.shaky.refused = [AWAY, LATE, LedgerRewound("suspect"), AWAY, AWAY, AWAY, AWAY]
    assert (await world.ledger.stats()).dispatched == 0
    assert world.pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert world.said == ["waiting for the ledger: connection refused", "the ledger is back after 3.5 s"]
    assert not world.ledger.is_away
    assert world.ledger.interruptions == 1


async def test_at_the_deadline_the_last_error_says_how_long_it_waited():
    world = World(deadline_s=2.0)
    world.shaky.refused = [AWAY] * 5 + [LedgerRewound("it lost writes")] * 50
    with pytest.raises(LedgerRewound, match=r"it lost writes; waited 2\.0 s for the ledger"):
        await world.ledger.stats()
    assert sum(world.pauses) == pytest.approx(2.0)
    assert len(world.said) == 1
    assert world.ledger.is_away


async def test_several_that_wait_say_it_once(world):
    world.shaky.refused = [AWAY] * 6
    await asyncio.gather(*(world.ledger.stats() for _ in range(3)))
    assert len(world.said) == 2


@pytest.mark.parametrize("error", [Fenced("another"), CommitRefused("lag"), LedgerError("no such group")])
async def test_answers_pass_at_once(world, error):
    world.shaky.refused = [error]
    with pytest.raises(type(error)):
        await world.ledger.settle(1, 0)
    assert world.shaky.calls == ["settle"]
    assert not world.said


async def test_a_put_whose_reply_was_lost_is_accepted(world):  # P2
    await world.h.begin()
    ticket = (await world.h.admit(0, 1))[0]
    both = [world.h.done(ticket.group, sample, float(sample), 0) for sample in (0, 1)]
    world.shaky.lost = [LATE]
    assert [reply.verdict for reply in await world.ledger.put(both)] == [Verdict.ACCEPTED] * 2
    assert [reply.verdict for reply in await world.ledger.put(both)] == [Verdict.DUPLICATE] * 2
    await world.h.expect_fates(in_flight=2)


async def test_a_retry_that_was_given_out_and_lost_is_given_out_again(world):
    await world.h.begin()
    ticket = (await world.h.admit(0, 1))[0]
    world.shaky.lost = [AWAY]
    reply = (await world.ledger.put([world.h.failed(ticket.group, 0)]))[0]
    assert (reply.verdict, reply.next_attempt) == (Verdict.RETRY, 1)
    await world.h.expect_fates(in_flight=2, failed_infrastructure=1)


async def test_a_lost_lease_goes_back_before_the_next(world):
    fence = await world.h.begin()
    first, second = await world.h.ready(0, 2)
    world.held = numbers(await world.ledger.lease(fence, 0, 0, 1))
    world.shaky.lost = [LATE]
    assert numbers(await world.ledger.lease(fence, 0, 0, 1)) == [second]
    assert world.held == [first]
    assert world.shaky.calls[-2:] == ["extend", "lease"]
    assert (await world.h.stats()).groups_leased == 2


async def test_whoever_holds_no_leases_does_not_lease_again():
    world = World()
    worker = PatientLedger(world.shaky, 10.0, world.said.append)
    fence = await world.h.begin()
    world.shaky.lost = [LATE]
    with pytest.raises(DeadlineExceeded):
        await worker.lease(fence, 0, 0, 1)


async def test_a_drop_whose_reply_was_lost_is_done(world):
    fence = await world.h.begin()
    await world.h.ready(0, 2)
    groups = numbers(await world.ledger.lease(fence, 0, 0, 2))
    world.shaky.lost = [AWAY]
    await world.ledger.drop(fence, groups, "nan")
    await world.h.expect_fates(dropped_nan=4)


async def test_a_drop_that_never_arrived_is_done_as_far_as_it_can_be(world):
    fence = await world.h.begin()
    await world.h.ready(0, 2)
    groups = numbers(await world.ledger.lease(fence, 0, 0, 2))
    world.shaky.refused = [AWAY]
    await world.inner.release(fence, groups[:1])
    await world.ledger.drop(fence, groups, "nan")
    await world.h.expect_fates(dropped_nan=2, in_flight=2)


async def test_a_drop_after_the_fence_was_lost_is_not_passed_over(world):
    fence = await world.h.begin()
    await world.h.ready(0, 1)
    groups = numbers(await world.ledger.lease(fence, 0, 0, 1))
    await world.inner.acquire_learner("another", takeover=True)
    world.shaky.refused = [AWAY]
    with pytest.raises(Fenced):
        await world.ledger.drop(fence, groups, "nan")


async def test_a_commit_whose_reply_was_lost_is_the_same_commit(world):  # P7
    fence = await world.h.begin()
    await world.h.ready(0, 1)
    request = world.h.request(fence, await world.ledger.stage(fence), 0, await world.ledger.lease(fence, 0, 0, 1))
    world.shaky.lost = [LATE]
    await world.ledger.commit(request)
    await world.h.expect_fates(trained=2)
    assert (await world.h.stats()).head == request.number


async def test_a_number_that_was_lost_is_never_used(world):  # P6
    fence = await world.h.begin()
    world.shaky.lost = [LATE]
    assert await world.ledger.stage(fence) == 2


async def test_a_fence_that_was_lost_is_followed_by_a_larger_one(world):
    world.shaky.lost = [LATE]
    fence = await world.ledger.acquire_learner("learner")
    assert fence == 2
    assert await world.ledger.stage(fence) == 0


async def test_watching_waits_within_its_own_time(world):
    await world.h.begin()
    world.shaky.refused = [AWAY] * 2
    assert await world.ledger.watch_head(None, 1.0) == 0
    assert sum(world.pauses) == pytest.approx(0.15)
    world.shaky.refused = [AWAY] * 9
    with pytest.raises(LedgerAway, match=r"waited 0\.3 s"):
        await world.ledger.watch_head(0, 0.3)


async def test_durability_is_not_asked_twice(world):
    """P11: a server that came back may have lost what it had before; the outbox keeps it and puts it again."""
    world.shaky.refused = [LATE]
    assert await world.ledger.durable(1.0) is False
    assert world.shaky.calls == ["durable"]
    assert world.ledger.interruptions == 1
    assert await world.ledger.durable(1.0) is True


async def test_waiting_ends_when_it_is_cancelled(world):
    asleep = asyncio.Event()

    async def sleep(seconds):
        asleep.set()
        await asyncio.Event().wait()

    ledger = PatientLedger(world.shaky, 10.0, world.said.append, sleep=sleep)
    world.shaky.refused = [AWAY]
    task = asyncio.create_task(ledger.stats())
    await asleep.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert world.shaky.calls == ["stats"]


async def test_a_rebuilt_ledger_ends_the_wait(world):  # P8
    await world.h.begin()
    await world.inner.restart()

    async def reconcile_meanwhile(seconds):
        world.now_s += seconds
        assert await world.inner.confirm(0, "content-0")

    ledger = PatientLedger(world.shaky, 10.0, world.said.append, clock=lambda: world.now_s, sleep=reconcile_meanwhile)
    assert await ledger.watch_head(None, 5.0) == 0
    assert (await ledger.admit(0, 2, 1, "worker")).tickets
    assert len(world.said) == 2
