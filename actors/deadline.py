"""The one timer of an episode."""

import asyncio
import time


class Deadline:
    """Every wait of an episode gets an end, at the price of two attributes.

    The timer is armed for the earliest limit seen so far; when it goes off before the present limit it is armed again.
    """

    def __init__(self, timer: asyncio.Timeout, budget_s: float) -> None:
        self._timer, self._call_at = timer, asyncio.get_running_loop().call_at
        self._ends = self._armed = self._due = time.monotonic() + budget_s
        self._handle = self._call_at(self._armed, self._ring)
        self.waiting_for = ""

    def allow(self, what: str, now: float, seconds: float) -> None:
        """From `now` on wait for `what`, at most this long and never beyond the budget."""
        self.waiting_for = what
        due = now + seconds
        self._due = due if due < self._ends else self._ends
        if self._due < self._armed:
            self._arm(self._due)

    @property
    def budget_is_spent(self) -> bool:
        """The episode has had all its seconds."""
        return time.monotonic() >= self._ends

    def disarm(self) -> None:
        """Nothing is waited for any more."""
        self._handle.cancel()

    def _arm(self, when: float) -> None:
        self._handle.cancel()
        self._armed = when
        self._handle = self._call_at(when, self._ring)

    def _ring(self) -> None:
        if time.monotonic() >= self._due:
            self._timer.reschedule(self._due)
        else:
            self._arm(self._due)
