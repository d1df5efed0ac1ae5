"""One loop timer for any number of deadlines.

Owns when to look, not what is due: the owner keeps the due times beside its open requests and sweeps them when told.
A timer per request would cost more than the request's frame.
"""

import asyncio
import math
from collections.abc import Callable

RESOLUTION_S = 0.01
"""Two sweeps are at least this far apart, so a deadline may be noticed this much late."""


class DeadlineTimer:
    """Calls `sweep(now)` at the earliest due time; `sweep` answers with the earliest that is left, or infinity."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sweep: Callable[[float], float]) -> None:
        self._loop = loop
        self._sweep = sweep
        self._handle: asyncio.TimerHandle | None = None
        self.next_s = math.inf

    def arm(self, due_s: float) -> None:
        """Look at `due_s` (loop time) at the latest. Only needed when it is before `next_s`."""
        if due_s < self.next_s:
            self.stop()
            self.next_s = due_s
            self._handle = self._loop.call_at(due_s, self._fire)

    def stop(self) -> None:
        """Look no more until armed again."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        self.next_s = math.inf

    def _fire(self) -> None:
        self.stop()
        now = self._loop.time()
        left = self._sweep(now)
        if left < math.inf:
            self.arm(max(left, now + RESOLUTION_S))
