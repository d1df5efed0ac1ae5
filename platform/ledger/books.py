"""The state of an in-memory ledger, and the moves that every transition is made of.

Invariant: each move changes a group's state and the fates of its attempts together, so that the equation of P3 holds
between any two calls. Which move a request leads to is `MemoryLedger`'s part; the decisions are in `policy.py`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from headrace.platform.errors import LedgerError
from headrace.platform.ledger import policy
from headrace.platform.ledger.checks import IN_FLIGHT, TRAINED, dropped
from headrace.platform.ledger.fate_log import FateLog, fate_row
from headrace.platform.ledger.policy import NO_VERSION, VersionNode
from headrace.platform.records.delivery import LedgerLimits, LedgerStats
from headrace.platform.records.ids import AttemptId
from headrace.platform.records.status import CancelReason, DropReason, Fate, FaultOwner

SWEPT = "-"
"""Stands for the hash of an attempt that its group's deadline ended: equal to no submission's hash."""


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
    """One sample of a group: its present attempt and what that left."""

    sample: int
    attempt: int = 0
    state: SlotState = SlotState.RUNNING
    payload_hash: str = ""
    payload: bytes = b""
    store_file: str = ""
    score: float = 0.0
    oldest_version: int = 0
    fate: str = ""


@dataclass(kw_only=True, slots=True)
class Group:
    """A dispatched group. Lease fields mean something only in the state they belong to."""

    number: int
    version: int
    dispatched_s: float
    deadline_s: float
    slots: list[Slot]
    state: GroupState = GroupState.OPEN
    deliveries: int = 0
    fence: int = 0
    lease_until_s: float = 0.0
    target_batches: int = 0
    consumed_by: int = NO_VERSION

    @property
    def done(self) -> list[Slot]:
        """The slots that hold an episode."""
        return [slot for slot in self.slots if slot.state is SlotState.DONE]

    @property
    def running(self) -> list[Slot]:
        """The slots whose present attempt has not ended."""
        return [slot for slot in self.slots if slot.state is SlotState.RUNNING]


@dataclass(kw_only=True)
class Books:
    """Groups, lineage and counts of one run."""

    run: str
    limits: LedgerLimits
    groups: dict[int, Group] = field(default_factory=dict)
    lineage: dict[int, VersionNode] = field(default_factory=dict)
    commits: dict[int, tuple[str, int]] = field(default_factory=dict)
    reserved: set[int] = field(default_factory=set)
    fates: Counter[str] = field(default_factory=Counter)
    fate_log: FateLog = field(default_factory=FateLog)
    refused: Counter[str] = field(default_factory=Counter)
    head: int = NO_VERSION
    last_number: int = NO_VERSION
    fence: int = 0
    sequence: int = 0
    dispatched: int = 0
    zero_variance: int = 0
    score_sum: float = 0.0
    score_count: int = 0
    revision: int = 0
    stop_reason: str = ""

    def in_state(self, state: GroupState) -> list[Group]:
        """The groups in `state`, oldest first."""
        return [group for group in self.groups.values() if group.state is state]

    def dispatch(self, count: int) -> None:
        """Count attempts that begin."""
        self.dispatched += count
        self.fates[IN_FLIGHT] += count

    def move(self, group: Group, slots: Sequence[Slot], before: str, after: str, version: int | None = None) -> None:
        """Change the fate of the slots' present attempts, and write each change down (P3)."""
        self.fates[before] -= len(slots)
        self.fates[after] += len(slots)
        for slot in slots:
            attempt_id = AttemptId(self.run, group.number, slot.sample, slot.attempt)
            self.fate_log.append(fate_row(attempt_id, after, version))

    @property
    def head_or_none(self) -> int | None:
        """The head, or None before the first commit."""
        return None if self.head == NO_VERSION else self.head

    def leased_to(self, fence: int, groups: Sequence[int]) -> list[Group]:
        """Those of `groups` that are leased to `fence`."""
        found = (self.groups.get(number) for number in dict.fromkeys(groups))
        return [group for group in found if group and group.state is GroupState.LEASED and group.fence == fence]

    def all_leased_to(self, fence: int, groups: Sequence[int]) -> list[Group]:
        """`groups`, or LedgerError when one of them is not leased to `fence`."""
        leased = self.leased_to(fence, groups)
        missing = set(groups) - {group.number for group in leased}
        if missing:
            raise LedgerError(f"group {min(missing)} is not leased to fence {fence}; its lease ran out or it is gone")
        return leased

    def lag(self, group: Group, parent: int, ahead: int) -> int:
        """Lag of the group's oldest member by its oldest action token (P14)."""
        versions = {slot.oldest_version for slot in group.done}
        limit = self.limits.max_lag
        return max(policy.path_lag(self.lineage, parent, ahead, version, limit) for version in versions)

    def drop(self, group: Group, reason: DropReason) -> None:
        """Finish a group whose slots have all ended; it leaves nothing behind (P10)."""
        self.move(group, group.done, IN_FLIGHT, dropped(reason))
        del self.groups[group.number]

    def close(self, group: Group) -> None:
        """All slots have ended: the group becomes ready or leaves at once (P20)."""
        scores = [slot.score for slot in group.done]
        reason = policy.closing_drop(self.limits, len(scores), min(scores, default=0.0), max(scores, default=0.0))
        if reason is DropReason.ZERO_VARIANCE:
            self.zero_variance += 1
        if reason is not None:
            self.drop(group, reason)
        else:
            group.state = GroupState.READY

    def requeue(self, group: Group) -> None:
        """Let a leased or consumed group be delivered again. Never in a stopped run: a stop leaves none leased."""
        group.state = GroupState.READY

    def raise_fence(self) -> int:
        """Whoever was the learner is so no longer, and its reservations are void; returns the new fence."""
        self.reserved.clear()
        self.fence += 1
        return self.fence

    def end_running(self, group: Group, fate: str) -> None:
        """End every attempt of the group that is still being played."""
        self.move(group, group.running, IN_FLIGHT, fate)
        for slot in group.running:
            slot.state, slot.payload_hash = SlotState.ENDED, SWEPT

    def sweep(self, now_s: float) -> None:
        """What time alone changes: groups over their deadline (case E7), learner leases that ran out."""
        for group in self.in_state(GroupState.OPEN):
            if group.deadline_s <= now_s:
                self.end_running(group, f"{Fate.FAILED}:{FaultOwner.INFRASTRUCTURE}")
                self.close(group)
        for group in self.in_state(GroupState.LEASED):
            if group.lease_until_s <= now_s:
                self.requeue(group)

    def stop(self, reason: str) -> None:
        """Take the run from its learner and close the books on all that is not consumed."""
        self.stop_reason = reason or CancelReason.STOPPED
        self.raise_fence()
        for group in self.in_state(GroupState.OPEN):
            self.end_running(group, f"{Fate.CANCELLED}:{CancelReason.STOPPED}")
            self.drop(group, DropReason.STOPPED)
        for group in [*self.in_state(GroupState.READY), *self.in_state(GroupState.LEASED)]:
            self.drop(group, DropReason.STOPPED)

    def stats(self) -> LedgerStats:
        """Every count, as of now."""
        count = {state: len(self.in_state(state)) for state in GroupState}
        return LedgerStats(
            dispatched=self.dispatched,
            fates={TRAINED: 0, IN_FLIGHT: 0} | {fate: number for fate, number in self.fates.items() if number},
            refused=dict(self.refused),
            head=self.head_or_none,
            head_batches=self.lineage[self.head].batches if self.head in self.lineage else 0,
            fence=self.fence,
            dispatch_sequence=self.sequence,
            groups_open=count[GroupState.OPEN],
            groups_ready=count[GroupState.READY],
            groups_leased=count[GroupState.LEASED],
            groups_consumed=count[GroupState.CONSUMED],
            zero_variance_since_commit=self.zero_variance,
            score_sum=self.score_sum,
            score_count=self.score_count,
            payload_bytes=sum(len(slot.payload) for group in self.groups.values() for slot in group.slots),
            revision=self.revision,
            stopped=bool(self.stop_reason),
        )
