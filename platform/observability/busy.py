"""When something was busy, and how much of that time something else was busy too.

Intervals are half-open `(start, end)` in seconds since the epoch on one host's clock. Shares of time are computed from
them afterwards, in pure functions.
"""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import TypeAlias

from headrace.platform.contracts import Clock

Interval: TypeAlias = tuple[float, float]


class BusyIntervals:
    """Records the time in which at least one of many concurrent things is running.

    At most `kept` intervals are held; `forgotten` counts the oldest ones that made room. Gaps of at most
    `merge_gap_s` close up. Threads may share it.
    """

    def __init__(self, clock: Clock, kept: int = 65536, merge_gap_s: float = 2e-4) -> None:
        self._clock = clock
        self._intervals: deque[Interval] = deque(maxlen=kept)
        self._merge_gap_s = merge_gap_s
        self._running = 0
        self._since = 0.0
        self._lock = threading.Lock()
        self.forgotten = 0

    def begin(self) -> None:
        """One more thing runs."""
        with self._lock:
            if self._running == 0:
                self._since = self._clock()
            self._running += 1

    def end(self) -> None:
        """One thing less runs.

        Raises:
            RuntimeError: when nothing was running.
        """
        with self._lock:
            if self._running == 0:
                raise RuntimeError("end() without begin(): busy time would be invented")
            self._running -= 1
            if self._running == 0:
                self._add(self._since, self._clock())

    @contextmanager
    def running(self) -> Iterator[None]:
        """`begin` and `end` around a block."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def intervals(self, since_s: float = float("-inf")) -> list[Interval]:
        """The intervals that end after `since_s`, oldest first, the present one up to now."""
        with self._lock:
            found = list(takewhile(lambda interval: interval[1] > since_s, reversed(self._intervals)))[::-1]
            if self._running and (now := self._clock()) > self._since:
                found.append((self._since, now))
            return found

    def _add(self, start: float, end: float) -> None:
        if self._intervals and start - self._intervals[-1][1] <= self._merge_gap_s:
            start = self._intervals.pop()[0]
        if len(self._intervals) == self._intervals.maxlen:
            self.forgotten += 1
        self._intervals.append((start, end))


def union(intervals: Sequence[Interval]) -> list[Interval]:
    """The same time as disjoint intervals in order; empty ones vanish."""
    merged: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def overlap(busy: Sequence[Interval], others: Sequence[Interval]) -> float:
    """Seconds that lie both in `busy` and in `others`; time covered twice counts once."""
    left, right = union(busy), union(others)
    seconds, i, j = 0.0, 0, 0
    while i < len(left) and j < len(right):
        seconds += max(0.0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return seconds


def duration(intervals: Sequence[Interval]) -> float:
    """Seconds that lie in any of the intervals."""
    return sum(end - start for start, end in union(intervals))
