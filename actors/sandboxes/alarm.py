"""One timer for deadlines that mostly move on: a command that ends in time costs the loop no timer of its own."""

import asyncio
import math
from collections.abc import Callable


class Alarm:
    """Calls `ring` once the last deadline that was set has passed. `stop` it when it is needed no more."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._ring = ring
        self._until = math.inf
        self._timer: asyncio.TimerHandle | None = None

    def set(self, until: float) -> None:
        """The deadline, by the loop's clock, in place of any before it; infinite is none."""
        self._until = until
        if self._timer is not None and self._timer.when() > until:
            self.stop()
        if self._timer is None and until < math.inf:
            self._timer = self._loop.call_at(until, self._due)

    def stop(self) -> None:
        """Ring no more, until `set` is called again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _due(self) -> None:
        self._timer = None
        if self._loop.time() >= self._until:
            self._ring()
        else:
            self.set(self._until)
