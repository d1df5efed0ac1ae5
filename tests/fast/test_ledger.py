"""The in-memory ledger passes the suite that every ledger passes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from headrace.platform.ledger.memory import MemoryLedger
from headrace.platform.records.delivery import LedgerLimits
from headrace.platform.testing.conformance.ledger import LEDGER_SUITE
from headrace.platform.testing.conformance.ledger_harness import LedgerHarness, limits


class ManualClock:
    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    async def advance(self, seconds: float) -> None:
        self.now_s += seconds


@asynccontextmanager
async def memory_ledger(chosen: LedgerLimits) -> AsyncIterator[LedgerHarness]:
    clock = ManualClock()
    ledger = MemoryLedger("test-run", chosen, clock)
    yield LedgerHarness(
        ledger=ledger,
        run="test-run",
        advance=clock.advance,
        mark=ledger.mark,
        rewind=ledger.rewind,
        wipe=ledger.wipe,
        restart=ledger.restart,
    )
    await ledger.close()


# cases Q1 Q2 Q3 Q4 Q5 Q7 Q8 Q10 Q11 Q12 Q15 Q18 Q20 Q21 Q23 Q24 E7
@pytest.mark.parametrize("case", LEDGER_SUITE)
async def test_suite(case: str) -> None:
    await LEDGER_SUITE[case](memory_ledger)


async def test_tickets_carry_the_clocks_time() -> None:
    async with memory_ledger(limits()) as h:
        await h.begin()
        await h.advance(5.0)
        ticket = (await h.admit(0, 1))[0]
        assert (ticket.dispatched_s, ticket.deadline_s) == (1005.0, 1065.0)  # P12


async def test_many_watchers_wake_up_together() -> None:
    async with memory_ledger(limits()) as h:
        watchers = [asyncio.create_task(h.ledger.watch_head(None, 30.0)) for _ in range(50)]
        await h.begin()
        assert await asyncio.gather(*watchers) == [0] * 50
