"""The same random play on the in-memory ledger and on the server gives the same replies, fates and counts."""

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from ledger_kit import START_S, connected

from headrace.platform.ledger.memory import MemoryLedger
from headrace.platform.ledger.server import EmbeddedServer
from headrace.platform.records.delivery import LedgerLimits
from headrace.platform.testing.conformance.ledger_harness import LedgerHarness
from headrace.platform.testing.conformance.ledger_machine import ledger_machine
from headrace.platform.testing.conformance.ledger_model import MASK_LIMITS, MODEL_LIMITS

RUN = "model"
# Shrinking would outlast the test's deadline; the message names the step that differs.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EmbeddedServer(tmp_path_factory.mktemp("queue")) as server:
        yield server.url


@asynccontextmanager
async def memory_ledger(chosen: LedgerLimits) -> AsyncIterator[LedgerHarness]:
    now_s = START_S

    async def advance(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    ledger = MemoryLedger(RUN, chosen, lambda: now_s)
    yield LedgerHarness(
        ledger=ledger,
        run=RUN,
        advance=advance,
        mark=ledger.mark,
        rewind=ledger.rewind,
        wipe=ledger.wipe,
        restart=ledger.restart,
    )


# P3 P5 P6 P7 P8 P14 P15 P16 P20
@pytest.mark.parametrize("chosen", [MODEL_LIMITS, MASK_LIMITS], ids=["drop", "mask"])
def test_both_ledgers_answer_alike(url: str, chosen: LedgerLimits) -> None:
    def on_server(limits: LedgerLimits) -> AbstractAsyncContextManager[LedgerHarness]:
        return connected(url, limits, RUN)

    run_state_machine_as_test(
        ledger_machine([memory_ledger, on_server], chosen),
        settings=settings(
            max_examples=25,
            stateful_step_count=60,
            deadline=None,
            phases=PHASES,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
