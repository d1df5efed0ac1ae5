"""A dispatched group and its slots, as an in-memory ledger keeps them: data only."""

from dataclasses import dataclass
from enum import StrEnum

from headrace.platform.ledger.checks import IN_FLIGHT
from headrace.platform.ledger.policy import NO_VERSION

SWEPT = "-"
"""Stands for the hash of an attempt that the ledger ended: equal to no submission's hash."""


class GroupState(StrEnum):
    """Where a group is; a finished one is nowhere (P10)."""

    OPEN = "open"
    READY = "ready"
    LEASED = "leased"
    CONSUMED = "consumed"


class SlotState(StrEnum):
    """Whether a slot's present attempt is being played, left an episode, or left none."""

    RUNNING = "running"
    DONE = "done"
    ENDED = "ended"


@dataclass(kw_only=True, slots=True)
class Slot:
    """One sample of a group: its present attempt and what that left.

    `started_s` is when the attempt was given out: None while it waits for a worker, or when the ledger was not there.
    `seconds` is how long it was played, once that has ended. `retried` says that it was given out in the reply to its
    predecessor's put. `lag` is the one that it was trained with.
    """

    sample: int
    attempt: int = 0
    state: SlotState = SlotState.RUNNING
    started_s: float | None = None
    seconds: float | None = None
    retried: bool = False
    payload_hash: str = ""
    payload: bytes = b""
    store_file: str = ""
    score: float = 0.0
    oldest_version: int = 0
    newest_version: int = 0
    fate: str = IN_FLIGHT
    lag: int = 0

    def start(self, attempt: int, started_s: float | None, *, retried: bool) -> None:
        """Go on to another attempt."""
        self.attempt, self.started_s, self.retried, self.seconds = attempt, started_s, retried, None
        self.state, self.fate, self.payload_hash = SlotState.RUNNING, IN_FLIGHT, ""

    def end(self, payload_hash: str) -> None:
        """The present attempt leaves no episode, or no longer."""
        self.state, self.payload_hash, self.payload = SlotState.ENDED, payload_hash, b""

    def played_s(self, now_s: float) -> float | None:
        """How long the present attempt was played; None when nobody played it or nobody knows."""
        if self.seconds is not None or self.started_s is None:
            return self.seconds
        return max(now_s - self.started_s, 0.0)


@dataclass(kw_only=True, slots=True)
class Group:
    """A dispatched group. `holder` and the lease fields mean something only in the state that they belong to.

    `position` is its place in the task source and `restarts` how often that was lost to lag (P16); `base` is the
    number of its slots' first attempts; `lag_keys` are the versions under which it is found when it is ready.
    """

    number: int
    position: int
    version: int
    dispatched_s: float
    deadline_s: float
    slots: list[Slot]
    restarts: int = 0
    base: int = 0
    state: GroupState = GroupState.OPEN
    holder: str = ""
    environment: str = ""
    deliveries: int = 0
    fence: int = 0
    target_batches: int = 0
    consumed_by: int = NO_VERSION
    lag_keys: frozenset[int] = frozenset()

    @property
    def done(self) -> list[Slot]:
        """The slots that hold an episode."""
        return [slot for slot in self.slots if slot.state is SlotState.DONE]

    @property
    def running(self) -> list[Slot]:
        """The slots whose present attempt has not ended."""
        return [slot for slot in self.slots if slot.state is SlotState.RUNNING]
