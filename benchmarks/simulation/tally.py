"""What a simulated run is judged by, added up attempt by attempt.

An attempt counts once its fate is final in the ledger's own log and its slot is free. `live` is the share of its
tokens that were trained: 1 under `sticky`, less when some were masked, 0 when it was discarded. Tokens are counted as
seconds of play.
"""

from collections import Counter
from dataclasses import dataclass, field

from simulation.durations import Durations

LONG_S = 240.0
"""Episodes longer than this are the long ones: eight learner steps of 30 s."""


@dataclass(slots=True)
class Attempt:
    """One simulated episode: its whole length, the version of each turn, when it ran, and what became of it."""

    duration_s: float
    turn_versions: tuple[int, ...] = ()
    started_s: float | None = None
    played_s: float | None = None
    live: float = 0.0
    fate: str = ""


@dataclass(slots=True)
class Tally:
    """Counts from `began_s` to `ended_s`; `limit` is the lag limit that nothing trained may exceed."""

    durations: Durations
    limit: int
    began_s: float
    ended_s: float = 0.0
    trained: int = 0
    alive: int = 0
    discarded: int = 0
    useful: float = 0.0
    trained_slot_s: float = 0.0
    discarded_slot_s: float = 0.0
    live_s: float = 0.0
    long_live_s: float = 0.0
    held_s: float = 0.0
    violations: int = 0
    lags: Counter[int] = field(default_factory=Counter)
    fates: Counter[str] = field(default_factory=Counter)
    ended_by_decile: list[int] = field(default_factory=lambda: [0] * 10)
    live_by_decile: list[float] = field(default_factory=lambda: [0.0] * 10)

    def token_lag(self, lag: int) -> None:
        """A turn was trained with this lag (P14)."""
        self.lags[lag] += 1
        self.violations += lag > self.limit

    def ended(self, attempt: Attempt) -> None:
        """An attempt is over: its fate is final and its slot is free."""
        played_s = attempt.played_s or 0.0
        self.fates[attempt.fate] += 1
        decile = self.durations.decile(attempt.duration_s)
        self.ended_by_decile[decile] += 1
        if attempt.fate != "trained":
            self.discarded += 1
            self.discarded_slot_s += played_s
            return
        self.trained += 1
        self.alive += attempt.live > 0
        self.useful += attempt.live
        self.trained_slot_s += played_s
        self.live_by_decile[decile] += attempt.live
        self.live_s += played_s * attempt.live
        if attempt.duration_s > LONG_S:
            self.long_live_s += played_s * attempt.live

    @property
    def span_s(self) -> float:
        """How long it was counted."""
        return self.ended_s - self.began_s

    @property
    def worst_lag(self) -> int:
        """The largest lag of any token that was trained."""
        return max(self.lags, default=0)

    @property
    def discarded_share(self) -> float:
        """Discarded over ended attempts."""
        return _share(self.discarded, self.trained + self.discarded)

    @property
    def discarded_slot_share(self) -> float:
        """The slot time that discarded attempts took, over all slot time."""
        return _share(self.discarded_slot_s, self.trained_slot_s + self.discarded_slot_s)

    @property
    def long_share(self) -> float:
        """Share of the trained tokens that come from long episodes, over their natural share: 1 is no bias (P16)."""
        return _share(self.long_live_s, self.live_s) / self.durations.longer_share(LONG_S)

    @property
    def deciles(self) -> list[float]:
        """Trained over ended by length decile, shortest first; masked tokens count as not trained."""
        pairs = zip(self.live_by_decile, self.ended_by_decile, strict=True)
        return [round(_share(live, ended), 3) for live, ended in pairs]


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
