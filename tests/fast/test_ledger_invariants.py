"""Random play on the in-memory ledger: the books add up after every step (P3), no slot is consumed twice (P1)."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from headrace.platform.ledger.memory import MemoryLedger
from headrace.platform.records.delivery import LedgerLimits
from headrace.platform.testing.conformance.ledger_harness import LedgerHarness
from headrace.platform.testing.conformance.ledger_machine import ledger_machine
from headrace.platform.testing.conformance.ledger_model import MASK_LIMITS, MODEL_LIMITS, STEP_KINDS, Step, play

small = st.integers(0, 5)
steps = st.lists(st.builds(Step, st.sampled_from(STEP_KINDS), small, small, small), min_size=50, max_size=80)


@asynccontextmanager
async def memory_ledger(chosen: LedgerLimits) -> AsyncIterator[LedgerHarness]:
    now_s = 1000.0

    async def advance(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    ledger = MemoryLedger("r", chosen, lambda: now_s)
    yield LedgerHarness(
        ledger=ledger,
        run="r",
        advance=advance,
        mark=ledger.mark,
        rewind=ledger.rewind,
        wipe=ledger.wipe,
        restart=ledger.restart,
    )


@pytest.mark.parametrize("chosen", [MODEL_LIMITS, MASK_LIMITS], ids=["drop", "mask"])
def test_state_machine(chosen: LedgerLimits) -> None:
    run_state_machine_as_test(
        ledger_machine([memory_ledger], chosen),
        settings=settings(max_examples=25, stateful_step_count=50, deadline=None),
    )


@given(steps)
@settings(max_examples=25, deadline=None)
def test_the_books_add_up(moves: list[Step]) -> None:
    async def played() -> None:
        async with memory_ledger(MODEL_LIMITS) as harness:
            await play(harness, moves)

    asyncio.run(played())
