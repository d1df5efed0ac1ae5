"""The driver watches the server: it starts it again, has its ledger reconciled, and does not wait for ever."""

import asyncio
import time

import msgspec
import pytest

from headrace.deploy import ledger_watch
from headrace.deploy.ledger_watch import LedgerWatch
from headrace.deploy.supervision import Supervision
from headrace.platform.errors import DeadlineExceeded, LedgerAway, LedgerError, RunFailed
from headrace.platform.ledger.memory import MemoryLedger
from headrace.platform.records.delivery import LedgerLimits, LedgerStats
from headrace.platform.store.events import RunEvent


class FakeServer:
    """Dies when told; `failures` of the next restarts go wrong."""

    def __init__(self) -> None:
        self.alive = True
        self.restarts = 0
        self.failures = 0

    def restart(self) -> str:
        self.restarts += 1
        if self.failures:
            self.failures -= 1
            raise LedgerError("no space left on device")
        self.alive = True
        return "unix:///s"


class Asked(MemoryLedger):
    """A ledger whose statistics are made up; `asked` counts."""

    def __init__(self) -> None:
        super().__init__("run", LedgerLimits(batch_groups=1, max_lag=0), time.time)
        self.suspect = False
        self.error: Exception | None = None
        self.asked = 0
        self.reconciled = 0

    async def stats(self) -> LedgerStats:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return msgspec.structs.replace(await super().stats(), suspect=self.suspect)

    async def make_trusted(self) -> bool:
        self.reconciled += 1
        self.suspect = False
        return True


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch):
    monkeypatch.setattr(ledger_watch, "_EVERY_S", 0.0)


class Scene:
    def __init__(self, max_restarts: int = 3, away_deadline_s: float = 60.0) -> None:
        self.told = []
        self.server, self.ledger = FakeServer(), Asked()
        supervision = Supervision(max_restarts, lambda kind, **detail: self.told.append((kind, detail)))
        self.watch = LedgerWatch(self.ledger, self.ledger.make_trusted, supervision, away_deadline_s, self.server)

    async def until(self, is_so) -> None:
        """Let it watch until something is so."""
        watching = asyncio.create_task(self.watch.run())
        while not is_so() and not watching.done():  # noqa: ASYNC110 - the watch is what is waited for
            await asyncio.sleep(0)
        if watching.done():
            watching.result()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def test_a_dead_server_is_started_again():  # P8
    scene = Scene()
    scene.server.alive = False
    await scene.until(lambda: scene.ledger.asked >= 2)
    assert scene.server.restarts == 1
    assert [kind for kind, _ in scene.told] == [RunEvent.PART_DIED, RunEvent.PART_RESTARTED]


async def test_one_that_cannot_be_started_ends_the_run_by_name():  # case E9
    scene = Scene(max_restarts=2)
    scene.server.alive, scene.server.failures = False, 99
    with pytest.raises(RunFailed, match=r"^server died 3 times .*: no space left on device$"):
        await scene.until(lambda: False)
    assert scene.server.restarts == 2


async def test_a_suspect_ledger_is_reconciled_once():  # P8
    scene = Scene()
    scene.ledger.suspect = True
    await scene.until(lambda: scene.ledger.asked >= 5)
    assert scene.ledger.reconciled == 1


@pytest.mark.parametrize("error", [LedgerAway("gone"), DeadlineExceeded("no answer")])
async def test_a_server_that_is_away_for_too_long_ends_the_run(error):  # case E9
    scene = Scene(away_deadline_s=0.0)
    scene.ledger.error = error
    with pytest.raises(LedgerAway, match=r"away for more than 0 s \(queue\.away_deadline_s\)"):
        await scene.until(lambda: False)


async def test_one_that_is_away_for_a_while_does_not():
    scene = Scene()
    scene.ledger.error = LedgerAway("gone")
    await scene.until(lambda: scene.ledger.asked >= 3)
    scene.ledger.error = None
    await scene.until(lambda: scene.ledger.asked >= 6)
    assert not scene.told
