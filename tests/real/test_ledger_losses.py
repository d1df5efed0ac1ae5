"""What a server may do to a run (P8, P11, P12): die, lose its last writes or all of them, stand still.

Workers and learner play on a real server while the test keeps what a run root would: manifests, checkpoints, fates.
After each loss the ledger is reconciled with that, the run goes on, the equation of P3 holds, and no slot is trained
twice along the lineage.
"""

import asyncio
import os
import random
import shutil
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis

from headrace.platform.errors import DeadlineExceeded, LedgerAway, LedgerError, LedgerRewound
from headrace.platform.ledger import redis_link
from headrace.platform.ledger.fate_log import drain_fates
from headrace.platform.ledger.policy import NO_VERSION
from headrace.platform.ledger.redis_ledger import RedisLedger
from headrace.platform.ledger.server import EmbeddedServer
from headrace.platform.records.delivery import GroupTicket, LeasedGroup, LedgerLimits
from headrace.platform.testing.conformance.ledger_harness import LedgerHarness, limits, raises
from headrace.platform.testing.conformance.ledger_run_root import RunRoot

RUN = "run"
SECONDS_CUT = 2.0
LIMITS = limits(max_lag=4, dispatch_lease_s=30.0, learner_lease_s=30.0)


async def _no_time(seconds: float) -> None:
    raise AssertionError(f"here time passes by itself, not by {seconds} s")


class Play:
    """A worker and a learner, one batch after the other, with a checkpoint at every third version."""

    def __init__(self, ledger: RedisLedger, chosen: LedgerLimits) -> None:
        self.ledger = ledger
        self.h = LedgerHarness(ledger=ledger, run=RUN, advance=_no_time)
        self.root = RunRoot(RUN, chosen)
        self.fence = 0
        self.head = NO_VERSION
        self.epoch = 0
        self.fates_read = 0

    async def begin(self) -> None:
        self.fence = await self.ledger.acquire_learner("learner", takeover=True)
        await self.publish([])

    async def publish(self, groups: list[LeasedGroup]) -> None:
        number = await self.ledger.stage(self.fence, self.root.highest + 1)
        self.root.highest = number
        request = self.h.request(self.fence, number, self.head, groups, batches=1 if groups else 0)
        self.root.write_manifest(request, groups)
        self.head = number
        await self.ledger.commit(request)

    async def admitted(self) -> list[GroupTicket]:
        return [*(await self.ledger.admit(self.head, 2, 2, "worker")).tickets]

    async def batch(self) -> None:
        """Two groups more, and a version from the two oldest."""
        await self.h.finish(await self.admitted())
        groups = [*await self.ledger.lease(self.fence, self.head, 0, 2)]
        if groups:
            await self.publish(groups)
        if self.head % 3 == 0:
            await self.ledger.settle(self.fence, self.head)
            self.root.checkpoints.add(self.head)

    async def keep_fates(self) -> None:
        rows, self.fates_read = await drain_fates(self.ledger, self.fates_read)
        self.root.rows.extend(rows)

    async def reconcile(self) -> None:
        """What the driver does; then a new learner resumes from the last checkpoint."""
        self.epoch += 1
        await self.ledger.reconcile(self.root.chain(self.epoch, (await self.ledger.stats()).head))
        await self.sound()
        await self.resume()

    async def resume(self) -> None:
        self.fence = await self.ledger.acquire_learner("learner", takeover=True)
        line = [number for number in self.root.consumed_on_lineage().values() if number in self.root.checkpoints]
        self.head = max(line, default=min(self.root.manifests))
        await self.ledger.rollback(self.fence, self.head)
        await self.ledger.disown("worker")

    async def sound(self) -> None:
        """The equation holds, and trained is what the manifests of the lineage say: each slot once."""
        stats = await self.h.stats()
        assert stats.head == self.root.newest()[0]
        assert stats.fates["trained"] == len(self.root.consumed_on_lineage())


@asynccontextmanager
async def played(server: EmbeddedServer, chosen: LedgerLimits = LIMITS) -> AsyncIterator[Play]:
    ledger = await RedisLedger.connect(server.url, RUN, chosen)
    try:
        play = Play(ledger, chosen)
        await play.begin()
        yield play
    finally:
        await ledger.close()


async def kill(server: EmbeddedServer, ledger: RedisLedger) -> None:
    """SIGKILL; the client notices."""
    os.kill(server.pid, signal.SIGKILL)
    await raises(LedgerAway, ledger.stats())
    end_s = time.monotonic() + 10
    while server.alive:
        assert time.monotonic() < end_s, "the server outlived SIGKILL by 10 s"
        await asyncio.sleep(0.005)


def append_only_file(folder: Path) -> Path:
    (path,) = (folder / "appendonlydir").glob("*.incr.aof")
    return path


async def test_sigkill_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:  # P12
    with EmbeddedServer(tmp_path) as server:
        chosen = limits(max_lag=4, dispatch_lease_s=1.0, learner_lease_s=1.0)
        async with played(server, chosen) as play:
            for _ in range(5):
                await play.batch()
            await play.h.finish(await play.admitted())
            leased = [*await play.ledger.lease(play.fence, play.head, 0, 2)]
            tickets = await play.admitted()
            before = await play.h.stats()
            assert await play.ledger.durable(20.0), "with a busy disk, Valkey may answer before it writes"
            await kill(server, play.ledger)
            await asyncio.sleep(1.2)  # beyond the terms of all leases
            server.restart()
            after = await play.ledger.stats()
            assert after.suspect
            assert (after.fates, after.head) == (before.fates, before.head)
            assert after.revision >= before.revision
            await raises(LedgerRewound, play.ledger.extend(play.fence, []))
            assert await play.ledger.confirm(*play.root.newest())
            trusted = await play.h.stats()
            assert (trusted.suspect, trusted.groups_leased, trusted.groups_waiting) == (False, 2, 0)
            await play.h.finish(tickets)
            await play.publish(leased)
            await play.sound()


@pytest.mark.parametrize("seed", range(6))
async def test_the_append_only_file_is_cut(seed: int, tmp_path: Path) -> None:  # case Q21, P8
    chance = random.Random(seed)
    with EmbeddedServer(tmp_path) as server:
        async with played(server) as play:
            path, marks = append_only_file(tmp_path), []
            began_s = time.monotonic()
            while time.monotonic() < began_s + SECONDS_CUT + 0.3:
                await play.batch()
                marks.append((time.monotonic(), path.stat().st_size))
            tickets = await play.admitted()
            size = path.stat().st_size
            cut_s = time.monotonic() - (0.0 if seed == 0 else chance.uniform(0.0, SECONDS_CUT))
            kept = max((mark for at_s, mark in marks if at_s <= cut_s), default=marks[0][1])
            # Mostly in the middle of a step, which is then lost as a whole.
            kept = min(size - 1, kept + chance.randrange(2000))
            await kill(server, play.ledger)
            os.truncate(path, kept)
            server.restart()
            await raises(LedgerRewound, play.h.put(*(play.h.done(ticket.group, 0, 1.0, 0) for ticket in tickets)))
            assert not await play.ledger.confirm(*play.root.newest())
            await play.reconcile()
            for _ in range(5):
                await play.batch()
            await play.sound()


async def test_another_client_than_the_driver_has_seen_more(tmp_path: Path) -> None:  # P8
    with EmbeddedServer(tmp_path) as server:
        async with played(server) as play:
            driver = await RedisLedger.connect(server.url, RUN, LIMITS)
            size = append_only_file(tmp_path).stat().st_size
            tickets = await play.admitted()
            await kill(server, play.ledger)
            os.truncate(append_only_file(tmp_path), size)
            server.restart()
            assert await driver.confirm(*play.root.newest()), "the driver has seen no more than there is"
            await raises(LedgerRewound, play.h.finish(tickets))
            await raises(LedgerRewound, driver.stage(play.fence))
            assert not await driver.confirm(*play.root.newest()), "now it knows of somebody who has"
            await driver.close()
            await play.reconcile()
            await play.batch()
            await play.sound()


async def test_an_empty_server_in_its_place(tmp_path: Path) -> None:  # P8
    with EmbeddedServer(tmp_path) as server:
        async with played(server) as play:
            for _ in range(8):
                await play.batch()
                await play.keep_fates()
            await play.admitted()
            before = await play.h.stats()
            await kill(server, play.ledger)
            shutil.rmtree(tmp_path / "appendonlydir")
            server.restart()
            await raises(LedgerRewound, play.batch())
            assert not await play.ledger.confirm(*play.root.newest())
            await play.reconcile()
            play.fates_read = 0
            stats = await play.h.stats()
            assert stats.dispatch_sequence >= before.dispatch_sequence - 2, "only what no row names may be given again"
            for _ in range(5):
                await play.batch()
            await play.sound()


async def test_a_server_that_stands_still_beyond_every_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_link, "CALL_DEADLINE_S", 0.3)
    with EmbeddedServer(tmp_path) as server:
        async with played(server, limits(max_lag=4, dispatch_lease_s=0.5, learner_lease_s=0.5)) as play:
            for _ in range(4):
                await play.batch()
            await play.h.finish(await play.admitted())
            leased = [*await play.ledger.lease(play.fence, play.head, 0, 2)]
            await play.ledger.extend(play.fence, [group.group for group in leased])
            tickets = await play.admitted()
            os.kill(server.pid, signal.SIGSTOP)
            await raises(DeadlineExceeded, play.h.finish(tickets))
            with pytest.raises((DeadlineExceeded, LedgerAway)):
                await play.ledger.extend(play.fence, [group.group for group in leased])
            await asyncio.sleep(0.5)  # with the two deadlines: beyond the leases
            os.kill(server.pid, signal.SIGCONT)
            verdicts = await play.h.put(*(play.h.done(ticket.group, 0, 1.0, play.head) for ticket in tickets))
            assert set(verdicts) == {"superseded"}, "P2: the groups were taken from a worker that said nothing"
            await raises(LedgerError, play.publish(leased))
            await play.reconcile()
            for _ in range(3):
                await play.batch()
            await play.sound()


async def test_two_runs_on_one_server_never_meet(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path) as server:
        ledgers = [await RedisLedger.connect(server.url, run, LIMITS) for run in ("a", "a.b", "b")]
        for ledger, run in zip(ledgers, ("a", "a.b", "b"), strict=True):
            h = LedgerHarness(ledger=ledger, run=run, advance=_no_time)
            fence = await h.begin()
            await h.ready(0, 2)
            await h.publish(fence, 0, await ledger.lease(fence, 0, 0, 1))
        client = Redis.from_url(server.url)
        keys = {key: await client.dump(key) async for key in client.scan_iter("*") if not key.startswith(b"{a}:")}
        assert {key.partition(b"}:")[0] for key in keys} == {b"{a.b", b"{b"}
        await ledgers[0].stop("enough")
        assert {key: await client.dump(key) for key in keys} == keys
        await client.aclose()
        for ledger in ledgers:
            await ledger.close()
