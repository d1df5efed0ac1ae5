"""The same random play on the in-memory ledger and on the server gives the same replies and counts."""

import asyncio
import itertools
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from headrace.platform.ledger.memory import MemoryLedger
from headrace.platform.ledger.redis_ledger import RedisLedger
from headrace.platform.ledger.server import EmbeddedServer
from headrace.platform.testing.conformance.ledger_harness import LedgerHarness
from headrace.platform.testing.conformance.ledger_model import MODEL_LIMITS, STEP_KINDS, Step, play

small = st.integers(0, 5)
steps = st.lists(st.builds(Step, st.sampled_from(STEP_KINDS), small, small, small), min_size=50, max_size=80)
# Shrinking would outlast the test's deadline; the message names the first step that differs.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
_runs = (f"model-{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EmbeddedServer(tmp_path_factory.mktemp("queue")) as server:
        yield server.url


@given(moves=steps)
@settings(
    max_examples=50,
    deadline=None,
    phases=PHASES,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_both_ledgers_answer_alike(url: str, moves: list[Step]) -> None:
    in_memory, on_server = asyncio.run(side_by_side(url, next(_runs), moves))
    for number, (expected, found) in enumerate(zip(in_memory, on_server, strict=True)):
        assert found == expected, f"step {number}, {[*moves, None][number]}"


async def side_by_side(url: str, run: str, moves: list[Step]) -> tuple[object, object]:
    now_s = 1000.0

    async def advance_memory(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    memory = MemoryLedger(run, MODEL_LIMITS, lambda: now_s)
    expected = await play(LedgerHarness(ledger=memory, run=run, advance=advance_memory), moves)

    now_s = 1000.0
    ledger = await RedisLedger.connect(url, run, MODEL_LIMITS)
    await ledger.set_clock(now_s)

    async def advance_server(seconds: float) -> None:
        await advance_memory(seconds)
        await ledger.set_clock(now_s)

    try:
        return expected, await play(LedgerHarness(ledger=ledger, run=run, advance=advance_server), moves)
    finally:
        await ledger.close()
