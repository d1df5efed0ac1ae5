"""The log of fates: one row for each change of an attempt's fate (P3), in the order in which they were decided.

Positions count rows from 1 on and are never used twice. A reader names the position up to which it has read, and what
lies there or before is forgotten: the log is a way out, and whoever reads it keeps the rows. It belongs to one reader.
Left unread it stops growing at `FATE_LOG_MOST` rows, and the oldest go.
"""

from collections import deque
from itertools import islice

from headrace.platform.contracts import Ledger
from headrace.platform.errors import LedgerError
from headrace.platform.records.ids import AttemptId
from headrace.platform.records.status import Fate
from headrace.platform.records.tables import FateRow

FATE_LOG_MOST = 1_000_000
"""Most rows that a ledger keeps unread; lua/prelude.lua has the same number."""
_READ_ROWS = 10_000


class FateLog:
    """The log in memory."""

    def __init__(self, most: int = FATE_LOG_MOST) -> None:
        self._rows: deque[FateRow] = deque(maxlen=most)
        self._newest = 0

    def append(self, row: FateRow) -> None:
        """Write down the next change."""
        self._rows.append(row)
        self._newest += 1

    def read(self, after: int, limit: int) -> tuple[list[FateRow], int]:
        """See `Ledger.fates`."""
        if after > self._newest:
            raise LedgerError(f"position {after} lies past the end of the fate log, {self._newest}")
        for _ in range(after - self._before):
            self._rows.popleft()
        rows = list(islice(self._rows, limit))
        return rows, self._before + len(rows) if rows else after

    @property
    def _before(self) -> int:
        """The position before the oldest row kept."""
        return self._newest - len(self._rows)


def fate_row(attempt_id: AttemptId, fate: str, version: int | None) -> FateRow:
    """The row of one change; `fate` is as in `LedgerStats.fates`, `version` the one that consumed a trained attempt."""
    kind, _, reason = fate.partition(":")
    return FateRow(episode_id=str(attempt_id), fate=Fate(kind), reason=reason, version=version)


async def drain_fates(ledger: Ledger, after: int) -> tuple[list[FateRow], int]:
    """Everything in the log after `after`, which the ledger then forgets, and the position to go on from."""
    rows: list[FateRow] = []
    while True:
        found, after = await ledger.fates(after, _READ_ROWS)
        if not found:
            return rows, after
        rows.extend(found)
