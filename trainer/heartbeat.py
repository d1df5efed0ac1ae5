"""Keeps a learner's leases, and its hold on the run, alive while it computes (P7, P12).

Renewing is a fenced call, so the ledger hears of the learner even when it holds no group. A failure other than a lost
fence is told by what comes after: the next lease, or the commit, which checks every lease.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from headrace.platform.contracts import Ledger
from headrace.platform.errors import DeadlineExceeded, Fenced, LedgerError

_log = logging.getLogger(__name__)

LONGEST_PAUSE_S = 20.0
"""However long the learner's term is: leases of groups are shorter than some terms, and longer than this."""


class Heartbeat:
    """Renews the leases of `held()` every `every_s` seconds, or more often, between `start` and `stop`."""

    def __init__(self, ledger: Ledger, held: Callable[[], Sequence[int]], every_s: float) -> None:
        self._ledger = ledger
        self._held = held
        self._every_s = min(every_s, LONGEST_PAUSE_S)
        self._fence = 0
        self._task: asyncio.Task[None] | None = None

    def start(self, fence: int) -> None:
        """Begin, under `fence`. Call it once."""
        self._fence = fence
        self._task = asyncio.create_task(self._beat())

    async def stop(self) -> None:
        """Be silent from now on: no call to the ledger is under way when this returns. Safe to call twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def renew(self) -> None:
        """Renew once, now. Raises Fenced: another learner holds the run, or it was stopped."""
        try:
            await self._ledger.extend(self._fence, self._held())
        except Fenced:
            raise
        except (LedgerError, DeadlineExceeded) as error:
            _log.warning("could not renew the learner's leases: %s", error)

    async def _beat(self) -> None:
        """Ends when the fence is lost: the learner's own next call says so to whoever waits for it."""
        while True:
            await asyncio.sleep(self._every_s)
            try:
                await self.renew()
            except Fenced as error:
                _log.warning("the learner's heartbeat ended: %s", error)
                return
