"""When a run that fails more than it plays must stop."""

from collections import Counter, deque
from collections.abc import Sequence

from headrace.platform.records.delivery import LedgerStats

FEWEST_ENDED = 32
"""Attempts that must have ended before a rate means anything."""
LATELY = 256
"""A world that breaks late in a run is judged by about this many attempts, not by all the good ones before."""


class Breaker:
    """Judges the attempts that ended lately (case E8); decides on what it is shown and reads no clock.

    A part that dies takes hundreds of attempts with it: those that it played, and those whose version nobody serves any
    more. It is judged by how often it dies (case E9), so what ends before the next commit is left out here; without a
    commit the learner's deadline ends the run.

    Args:
        max_failure_rate: the largest share of them that may have failed.
    """

    def __init__(self, max_failure_rate: float) -> None:
        self._max_failure_rate = max_failure_rate
        self._seen: deque[tuple[int, Counter[str]]] = deque([(0, Counter())])
        self._disturbances = (0, 0)
        self._waits = False
        self._head: int | None = None

    def cause(self, stats: LedgerStats, faults: Sequence[str], restarts: int = 0) -> str | None:
        """Why the run should stop now, None while it may go on.

        Args:
            stats: the ledger's counts, newer at each call.
            faults: the last faults of episodes; one is quoted.
            restarts: how many parts were started again so far.
        """
        owners = Counter({fate.partition(":")[2]: n for fate, n in stats.fates.items() if fate.startswith("failed")})
        # What was delivered has ended, though it is in flight until it is trained or dropped (P3).
        ended = stats.score_count + owners.total()
        if (restarts, stats.epoch) != self._disturbances:
            self._disturbances = (restarts, stats.epoch)
            self._waits, self._head = True, stats.head
        if self._waits:
            self._seen = deque([(ended, owners)])
            self._waits = stats.head == self._head
            return None
        while len(self._seen) > 1 and ended - self._seen[1][0] >= LATELY:
            self._seen.popleft()
        since, failed_before = self._seen[0]
        if ended > self._seen[-1][0]:
            self._seen.append((ended, owners))
        lately, failed = ended - since, owners - failed_before
        if lately < FEWEST_ENDED or failed.total() <= self._max_failure_rate * lately:
            return None
        example = f"; the last one: {faults[-1]}" if faults else ""
        return (
            f"{failed.total()} of the last {lately} attempts failed (by owner: {dict(failed)}),"
            f" more than {self._max_failure_rate:.0%}{example}"
        )
