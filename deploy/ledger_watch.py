"""The run's server and whether its ledger can be trusted, watched by the driver from start to end.

    embedded server died ──► started again, in its folder, at its address ─┐
    ledger suspect (restarted or rewound, P8) ─────────────────────────────┴─► reconcile ──► everybody goes on

Everybody else waits meanwhile (`PatientLedger`), and so nobody but the driver reconciles. A server of someone else's is
waited for, at most `queue.away_deadline_s`.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from headrace.deploy.supervision import Supervision
from headrace.platform.contracts import Ledger
from headrace.platform.errors import DeadlineExceeded, LedgerAway, LedgerError
from headrace.platform.ledger.server import EmbeddedServer

_log = logging.getLogger(__name__)
SERVER = "server"
_EVERY_S = 0.2
_GONE = "its process is gone"


class LedgerWatch:
    """See the module.

    Args:
        ledger: a connection that does not wait by itself for a server that is away.
        reconcile: makes a suspect ledger trusted again; true if its books had to be changed (P8).
        supervision: counts deaths of the embedded server.
        away_deadline_s: how long a server may be away.
        server: the embedded one, if there is one.
    """

    def __init__(
        self,
        ledger: Ledger,
        reconcile: Callable[[], Awaitable[bool]],
        supervision: Supervision,
        away_deadline_s: float,
        server: EmbeddedServer | None,
    ) -> None:
        self._ledger = ledger
        self._reconcile = reconcile
        self._supervision = supervision
        self._away_deadline_s = away_deadline_s
        self._server = server
        self._cause = _GONE
        self._away_since_s: float | None = None

    async def run(self) -> None:
        """Watch until cancelled.

        Raises:
            RunFailed: the embedded server died too often.
            LedgerAway: the server was away for too long.
        """
        while True:
            await self._look()
            await asyncio.sleep(_EVERY_S)

    async def _look(self) -> None:
        server = self._server
        if server is not None and not server.alive:
            self._supervision.died(SERVER, self._cause)
            try:
                await asyncio.to_thread(server.restart)
            except (LedgerError, DeadlineExceeded) as error:
                self._cause = str(error)
                return
            self._cause = _GONE
            self._supervision.is_back(SERVER)
        try:
            stats = await self._ledger.stats()
            if stats.suspect:
                changed = await self._reconcile()
                _log.warning("the ledger was %s", "rebuilt from the manifests" if changed else "found to be whole")
            self._away_since_s = None
        except (LedgerAway, DeadlineExceeded) as error:
            now_s = time.monotonic()
            self._away_since_s = self._away_since_s or now_s
            if now_s - self._away_since_s > self._away_deadline_s:
                raise LedgerAway(
                    f"the ledger's server was away for more than {self._away_deadline_s:g} s"
                    f" (queue.away_deadline_s): {error}"
                ) from error
