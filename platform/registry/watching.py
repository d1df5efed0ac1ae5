"""Waiting for a committed version: the part of `watch` that all registries share."""

import asyncio

from headrace.platform.contracts import Ledger


async def wait_committed(ledger: Ledger, after: int, timeout_s: float) -> int | None:
    """The number of a committed head above `after`, or None when the time is over.

    A head that a rollback moved back (P6) is not above `after`; the wait goes on from there.
    """
    loop = asyncio.get_running_loop()
    end_s = loop.time() + timeout_s
    seen = after if after >= 0 else None
    while True:
        head = await ledger.watch_head(seen, max(end_s - loop.time(), 0.0))
        if head is not None and head > after:
            return head
        if loop.time() >= end_s:
            return None
        seen = head
