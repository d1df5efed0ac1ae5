"""Random play on the in-memory ledger: the books add up after every step (P3), no slot is consumed twice (P1)."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.platform.ledger.memory import MemoryLedger
from headrace.platform.testing.conformance.ledger_harness import LedgerHarness
from headrace.platform.testing.conformance.ledger_model import MODEL_LIMITS, STEP_KINDS, Step, play

small = st.integers(0, 5)
steps = st.lists(st.builds(Step, st.sampled_from(STEP_KINDS), small, small, small), min_size=50, max_size=80)


@given(steps)
@settings(max_examples=100, deadline=None)
def test_the_books_add_up(moves: list[Step]) -> None:
    now_s = 0.0

    async def advance(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    ledger = MemoryLedger("r", MODEL_LIMITS, lambda: now_s)
    asyncio.run(play(LedgerHarness(ledger=ledger, run="r", advance=advance), moves))
