"""The one timer of an episode."""

import asyncio
import math
import time
from types import TracebackType


class Deadline:
    """Every wait of an episode gets an end, at the price of two attributes.

    `with deadline:` is to all waits inside what `asyncio.timeout` is to one: a wait that outlasts what `allow` gave it
    is cancelled and leaves the block as TimeoutError; a cancellation from elsewhere stays one. The timer is armed for
    the earliest limit seen so far; when it goes off before the present limit it is armed again.
    """

    def __init__(self, budget_s: float) -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task(loop)
        if task is None:
            raise RuntimeError("a deadline belongs to a task")
        self._task, self._call_at = task, loop.call_at
        self._ends = time.monotonic() + budget_s  # monotonic is the event loop's clock too
        self._due = self._armed = math.inf
        self._handle: asyncio.TimerHandle | None = None
        self._cancellations = self._rings = 0
        self.waiting_for = ""

    def allow(self, what: str, now: float, seconds: float) -> None:
        """From `now` on wait for `what`, at most this long and never beyond the budget."""
        self.waiting_for = what
        due = now + seconds
        self._due = due = due if due < self._ends else self._ends
        if due < self._armed:
            self._arm(due)

    def lift_budget(self) -> None:
        """What follows must be done whatever the episode has used."""
        self._ends = math.inf

    @property
    def budget_is_spent(self) -> bool:
        """The episode has had all its seconds."""
        return time.monotonic() >= self._ends

    def disarm(self) -> None:
        """Nothing is waited for any more."""
        if self._handle is not None:
            self._handle.cancel()

    def __enter__(self) -> None:
        self._cancellations = self._task.cancelling()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._rings:
            return
        while self._rings:  # more than one where something swallowed the first
            self._rings -= 1
            self._task.uncancel()
        if self._task.cancelling() <= self._cancellations and isinstance(error, asyncio.CancelledError):
            raise TimeoutError(f"{self.waiting_for} outran its deadline") from error

    def _arm(self, when: float) -> None:
        self.disarm()
        self._armed = when
        self._handle = self._call_at(when, self._ring)

    def _ring(self) -> None:
        if time.monotonic() < self._due:
            self._arm(self._due)
        else:
            self._armed = math.inf
            self._rings += 1
            self._task.cancel()
