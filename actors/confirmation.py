"""Empties a worker's outbox: what the server will not forget leaves it, and what it may have lost is put again (P11).

A put leaves the outbox when the server has confirmed its disk in a call that began some seconds after the put was
answered: disks, too, promise more than they keep. Before that, a server that was away, or a ledger that was rebuilt
(P8), may be without it: then all that was answered is put once more. The ledger knows what it knew already (P2), so
that this is always safe.

Where the server cannot tell what is on its disk, time alone empties the outbox, and the worker says so.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from headrace.actors.outbox import Entry, Outbox
from headrace.platform.contracts import Clock, Ledger
from headrace.platform.ledger.patient import PatientLedger

CONFIRMED, BEST_EFFORT = "confirmed", "best-effort"

_log = logging.getLogger(__name__)
_MARGIN_S = 5.0
_DURABLE_DEADLINE_S = 5.0
_BATCH = 512
_SURE_AFTER = 3
"""So many prompt denials in a row are the server's nature; one may be a lost connection."""


class _Books(NamedTuple):
    """Differs from what it was when the server may have lost something: how often the ledger was rebuilt, how often
    its server was away, and whether it is not trusted now."""

    epoch: int
    interruptions: int
    suspect: bool


class Confirmation:
    """Watches over one outbox. `durability` is CONFIRMED or BEST_EFFORT, or empty while that is not known.

    Args:
        ledger: where the puts go.
        outbox: what watches over.
        clock: monotonic, in seconds; the one that entries are stamped with.
    """

    def __init__(self, ledger: Ledger, outbox: Outbox, clock: Clock = time.monotonic) -> None:
        self._ledger = ledger
        self._outbox = outbox
        self._clock = clock
        self._books: _Books | None = None
        self._denials = 0
        self.durability = ""

    async def put_left(self) -> None:
        """Put what an earlier process has left. Nothing is admitted before (P11).

        Any answer ends an entry. An attempt that is to be played again is left to its lease: that was the earlier
        process's, and runs out.
        """
        if self._books is None:
            self._books = await self._state_of_books()
            await self._put(self._outbox.entries())

    async def round(self) -> None:
        """Look after the outbox once; called about every second."""
        if not len(self._outbox):
            return
        if (books := await self._state_of_books()) != self._books:
            self._books = books
            await self._put([entry for entry in self._outbox.entries() if entry.answered_s is not None])
            return
        began_s = self._clock()
        durable = await self._ledger.durable(_DURABLE_DEADLINE_S)
        took_s = self._clock() - began_s
        if await self._state_of_books() != books:
            return  # the promise may be that of a server which is gone
        self._judge(durable, took_s)
        if durable or self.durability == BEST_EFFORT:
            await asyncio.to_thread(self._outbox.forget, began_s - _MARGIN_S)

    async def _state_of_books(self) -> "_Books":
        stats = await self._ledger.stats()
        interruptions = self._ledger.interruptions if isinstance(self._ledger, PatientLedger) else 0
        return _Books(stats.epoch, interruptions, stats.suspect)

    def _judge(self, durable: bool, took_s: float) -> None:
        if durable:
            self._denials, self.durability = 0, CONFIRMED
        elif took_s < _DURABLE_DEADLINE_S / 2:
            self._denials += 1
            if self._denials >= _SURE_AFTER and self.durability != BEST_EFFORT:
                self.durability = BEST_EFFORT
                _log.warning(
                    "durability: %s: the ledger's server cannot confirm that puts are on its disk; use Valkey, or"
                    " Redis from 7.2 on, or `appendfsync always`",
                    BEST_EFFORT,
                )

    async def _put(self, entries: Sequence[Entry]) -> None:
        for start in range(0, len(entries), _BATCH):
            batch = entries[start : start + _BATCH]
            replies = await self._ledger.put([entry.submission for entry in batch])
            answered_s = self._clock()
            for entry in batch:
                entry.answered_s = answered_s
            verdicts = Counter(reply.verdict.value for reply in replies)
            _log.info("put again from the outbox: %s", ", ".join(f"{n} {what}" for what, n in verdicts.items()))
