"""The log of fates in memory: its bound, its positions, and reading it to the end."""

import pytest

from headrace.platform.errors import LedgerError
from headrace.platform.ledger.fate_log import FateLog, drain_fates, fate_row
from headrace.platform.ledger.memory import MemoryLedger
from headrace.platform.records.ids import AttemptId
from headrace.platform.records.status import Fate
from headrace.platform.records.tables import FateRow
from headrace.platform.testing.conformance.ledger_harness import LedgerHarness, limits


def row(number: int) -> FateRow:
    return fate_row(AttemptId("r", number, 0), "dropped:lag", None)


def test_the_oldest_rows_go_and_the_positions_show_it() -> None:
    log = FateLog(most=3)
    for number in range(1, 6):
        log.append(row(number))
    assert log.read(0, 2) == ([row(3), row(4)], 4)
    assert log.read(1, 2) == ([row(3), row(4)], 4)
    assert log.read(4, 2) == ([row(5)], 5)
    with pytest.raises(LedgerError, match="position 6 lies past the end of the fate log, 5"):
        log.read(6, 1)


def test_a_row_takes_a_fate_apart() -> None:
    attempt_id = AttemptId("r", 4, 1, 2)
    assert fate_row(attempt_id, "trained", 7) == FateRow(episode_id="r.t4.1.2", fate=Fate.TRAINED, version=7)
    failed = FateRow(episode_id="r.t4.1.2", fate=Fate.FAILED, reason="infrastructure")
    assert fate_row(attempt_id, "failed:infrastructure", None) == failed


async def test_draining_goes_on_from_the_kept_position() -> None:
    async def no_time(seconds: float) -> None:
        raise AssertionError(f"nothing here waits {seconds} s")

    ledger = MemoryLedger("r", limits(), lambda: 0.0)
    h = LedgerHarness(ledger=ledger, run="r", advance=no_time)
    await h.begin()
    assert await drain_fates(ledger, 0) == ([], 0)
    await h.finish(await h.admit(0, 2), scores=(0.5, 0.5))
    rows, position = await drain_fates(ledger, 0)
    assert [each.episode_id for each in rows] == ["r.t0.0.0", "r.t0.1.0", "r.t1.0.0", "r.t1.1.0"]
    assert position == 4
    assert await drain_fates(ledger, position) == ([], 4)
    assert await ledger.fates(0, 10) == ([], 0), "what was drained is forgotten"
