"""The state of an in-memory ledger, and the moves that every transition is made of.

Invariants: each move changes a group's state and the fates of its attempts together, so that the equation of P3 holds
between any two calls; every group is in the indexes of its state and in no others. Which moves a request leads to is
decided in `dispatch.py`, `leasing.py`, `rebuilding.py` and `MemoryLedger`; the decisions as such are in `policy.py`.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.platform.errors import LedgerError
from headrace.platform.ledger import policy
from headrace.platform.ledger.checks import IN_FLIGHT, TRAINED, dropped
from headrace.platform.ledger.fate_log import FateLog, fate_row
from headrace.platform.ledger.groups import SWEPT, Group, GroupState, Slot
from headrace.platform.ledger.indexes import Buckets, Ordered, Timers
from headrace.platform.ledger.policy import NO_VERSION, LagView, VersionNode
from headrace.platform.records.delivery import LedgerLimits, LedgerStats
from headrace.platform.records.ids import AttemptId
from headrace.platform.records.status import CancelReason, DropReason, Fate, FaultOwner

LOST = f"{Fate.FAILED}:{FaultOwner.INFRASTRUCTURE}"
"""The fate of an attempt that nobody will answer for."""


@dataclass(kw_only=True)
class Books:
    """Groups, lineage and counts of one run. `now_s` is the time of the step that is under way."""

    run: str
    limits: LedgerLimits
    now_s: float = 0.0
    groups: dict[int, Group] = field(default_factory=dict)
    lineage: dict[int, VersionNode] = field(default_factory=dict)
    commits: dict[int, tuple[str, int]] = field(default_factory=dict)
    reserved: set[int] = field(default_factory=set)
    head: int = NO_VERSION
    next_number: int = 0
    fence: int = 0
    learner: str = ""
    learner_seen_s: float = 0.0
    sequence: int = 0
    restarts: deque[tuple[int, int]] = field(default_factory=deque)
    allowed: dict[str, frozenset[str]] = field(default_factory=dict)
    stop_reason: str = ""
    revision: int = 0
    epoch: int = 0
    suspect: bool = False
    # Counts.
    fates: Counter[str] = field(default_factory=Counter)
    fate_log: FateLog = field(default_factory=FateLog)
    refused: Counter[str] = field(default_factory=Counter)
    lags: Counter[int] = field(default_factory=Counter)
    slot_seconds: dict[str, float] = field(default_factory=dict)
    lengths: dict[str, Counter[int]] = field(default_factory=dict)
    dispatched: int = 0
    zero_variance: int = 0
    protection_lost: int = 0
    score_sum: float = 0.0
    score_count: int = 0
    payload_bytes: int = 0
    # Indexes: groups by state, and by what a step looks for.
    open: Ordered = field(default_factory=Ordered)
    waiting: Ordered = field(default_factory=Ordered)
    ready: Ordered = field(default_factory=Ordered)
    leased: Ordered = field(default_factory=Ordered)
    consumed: Buckets[int] = field(default_factory=Buckets)
    open_versions: Buckets[int] = field(default_factory=Buckets)
    ready_versions: Buckets[int] = field(default_factory=Buckets)
    held: Buckets[str] = field(default_factory=Buckets)
    deadlines: Timers = field(default_factory=Timers)
    dispatch_leases: Timers = field(default_factory=Timers)
    learner_leases: Timers = field(default_factory=Timers)

    # --- states -------------------------------------------------------------------------------------------------------

    def enter(self, group: Group) -> None:
        """Take up a new group, in the state that it has."""
        self.groups[group.number] = group
        self._index(group)

    def place(self, group: Group, state: GroupState) -> None:
        """Move a group to `state`, or look at it anew where it is."""
        self._unindex(group)
        group.state = state
        self._index(group)

    def leave(self, group: Group) -> None:
        """A finished group leaves nothing behind (P10)."""
        self._unindex(group)
        del self.groups[group.number]
        self.payload_bytes -= sum(len(slot.payload) for slot in group.slots)

    def _index(self, group: Group) -> None:
        number = group.number
        if group.state is GroupState.OPEN:
            self.open.add(number)
            self.waiting.add(number)
            self.open_versions.add(group.version, number)
            self.deadlines.set(number, group.deadline_s)
        elif group.state is GroupState.READY:
            self.ready.add(number)
            masks = self.limits.mask_over_lag
            group.lag_keys = frozenset(slot.newest_version if masks else slot.oldest_version for slot in group.done)
            for version in group.lag_keys:
                self.ready_versions.add(version, number)
        elif group.state is GroupState.LEASED:
            self.leased.add(number)
        else:
            self.consumed.add(group.consumed_by, number)

    def _unindex(self, group: Group) -> None:
        number = group.number
        if group.state is GroupState.OPEN:
            self.unhold(group)
            self.waiting.remove(number)
            self.open.remove(number)
            self.open_versions.remove(group.version, number)
            self.deadlines.stop(number)
        elif group.state is GroupState.READY:
            self.ready.remove(number)
            for version in group.lag_keys:
                self.ready_versions.remove(version, number)
        elif group.state is GroupState.LEASED:
            self.leased.remove(number)
            self.learner_leases.stop(number)
        else:
            self.consumed.remove(group.consumed_by, number)

    def hold(self, group: Group, holder: str) -> None:
        """Give the dispatch lease of an open group that nobody holds to `holder` (P2)."""
        group.holder = holder
        self.waiting.remove(group.number)
        self.held.add(holder, group.number)
        self.dispatch_leases.set(group.number, self.now_s + self.limits.dispatch_lease_s)

    def unhold(self, group: Group) -> None:
        """Nobody has the dispatch lease: the group waits for a worker."""
        if group.holder:
            self.held.remove(group.holder, group.number)
            self.dispatch_leases.stop(group.number)
            group.holder = ""
            self.waiting.add(group.number)

    def of(self, numbers: Sequence[int]) -> list[Group]:
        """The groups of numbers that an index gave."""
        return [self.groups[number] for number in numbers]

    # --- fates --------------------------------------------------------------------------------------------------------

    def dispatch(self, count: int) -> None:
        """Count attempts that begin."""
        self.dispatched += count
        self.fates[IN_FLIGHT] += count

    def move(self, number: int, slots: Sequence[Slot], fate: str, version: int | None = None) -> None:
        """Change the fate of the present attempts of `slots` in group `number`, and write each change down (P3)."""
        for slot in slots:
            self.fates[slot.fate] -= 1
            self.fates[fate] += 1
            self.tally(slot, -1)
            slot.fate, slot.seconds = fate, slot.played_s(self.now_s)
            self.tally(slot, 1)
            attempt_id = AttemptId(self.run, number, slot.sample, slot.attempt)
            self.fate_log.append(fate_row(attempt_id, fate, version))

    def tally(self, slot: Slot, count: int) -> None:
        """Count a final fate's lag and length, or take them back. Attempts whose length nobody knows have none."""
        if slot.fate == TRAINED:
            self.lags[slot.lag] += count
        if slot.fate == IN_FLIGHT or slot.seconds is None:
            return
        self.slot_seconds[slot.fate] = self.slot_seconds.get(slot.fate, 0.0) + count * slot.seconds
        kind = slot.fate.partition(":")[0]
        self.lengths.setdefault(kind, Counter())[policy.length_bucket(slot.seconds)] += count

    def forget_payload(self, slot: Slot) -> None:
        """The ledger keeps the id only."""
        self.payload_bytes -= len(slot.payload)
        slot.payload = b""

    def end_running(self, group: Group, fate: str) -> None:
        """End every attempt of the group that is still being played."""
        running = group.running
        self.move(group.number, running, fate)
        for slot in running:
            slot.end(SWEPT)

    def end_done(self, group: Group, slots: Sequence[Slot], fate: str) -> None:
        """Members leave their group. Their hashes stay, so that the same put again is a duplicate."""
        self.move(group.number, slots, fate)
        for slot in slots:
            self.forget_payload(slot)
            slot.end(slot.payload_hash)

    def drop(self, group: Group, reason: DropReason) -> None:
        """Finish a group whose slots have all ended."""
        self.move(group.number, group.done, dropped(reason))
        self.leave(group)

    def close(self, group: Group) -> DropReason | None:
        """All slots have ended: the group becomes ready, or is dropped at once for the reason returned (P20)."""
        scores = [slot.score for slot in group.done]
        reason = policy.closing_drop(self.limits, len(scores), min(scores, default=0.0), max(scores, default=0.0))
        if reason is DropReason.ZERO_VARIANCE:
            self.zero_variance += 1
        if reason is None:
            self.place(group, GroupState.READY)
        else:
            self.drop(group, reason)
        return reason

    def lost_to_lag(self, group: Group) -> None:
        """A whole group has left for lag: its task is dispatched again, or was protected in vain (P16)."""
        if policy.is_protected(self.limits, group.restarts):
            self.protection_lost += 1
        if group.restarts < self.limits.lag_restarts:
            self.restarts.append((group.position, group.restarts + 1))

    def consume(self, group: Group, version: int) -> None:
        """`version` has taken in what is left of the group: not deliverable, and not final before it settles (P5)."""
        group.consumed_by, group.deliveries = version, 0
        self.place(group, GroupState.CONSUMED)

    def recall(self, group: Group) -> None:
        """What consumed the group is no longer on the lineage: its episodes come again (P6)."""
        self.move(group.number, group.done, IN_FLIGHT)
        self.place(group, GroupState.READY)

    # --- the learner --------------------------------------------------------------------------------------------------

    @property
    def head_or_none(self) -> int | None:
        """The head, or None before the first commit."""
        return None if self.head == NO_VERSION else self.head

    def lag_view(self, parent: int, ahead: int) -> LagView:
        """Lags for a batch that starts `ahead` batches past `parent` (P14)."""
        return LagView(self.lineage, parent, ahead, self.limits.max_lag)

    def is_on_lineage(self, version: int, head: int) -> bool:
        """Whether `version` is `head` or an ancestor of it."""
        return policy.is_ancestor(self.lineage, version, head)

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

    def requeue_leased(self) -> None:
        """Every leased group can be delivered again. Never in a stopped run: a stop leaves none leased."""
        for group in self.of(list(self.leased)):
            self.place(group, GroupState.READY)

    def recall_orphans(self, head: int) -> None:
        """What versions off the lineage of `head` consumed comes again (P6)."""
        for group in self.of(self.consumed.where(lambda consumer: not self.is_on_lineage(consumer, head))):
            self.recall(group)

    def finish_settled(self, version: int) -> None:
        """Consumption by `version` and its ancestors is final (P5)."""
        for group in self.of(self.consumed.where(lambda consumer: self.is_on_lineage(consumer, version))):
            self.leave(group)

    def raise_fence(self) -> int:
        """Whoever was the learner is so no longer, and its reservations are void; returns the new fence."""
        self.reserved.clear()
        self.fence += 1
        return self.fence

    def drop_all(self) -> None:
        """Leave nothing in flight."""
        for group in self.of(list(self.open)):
            self.end_running(group, f"{Fate.CANCELLED}:{CancelReason.STOPPED}")
            self.drop(group, DropReason.STOPPED)
        for group in self.of([*self.ready, *self.leased]):
            self.drop(group, DropReason.STOPPED)

    def stop(self, reason: str) -> None:
        """Take the run from its learner and close the books on all that is not consumed."""
        self.stop_reason = reason or CancelReason.STOPPED
        self.learner = ""
        self.raise_fence()
        self.restarts.clear()
        self.drop_all()

    def stats(self, now_s: float) -> LedgerStats:
        """Every count, as of `now_s`. What is zero is left out of the histograms."""
        lengths = {kind: {bucket: n for bucket, n in counts.items() if n} for kind, counts in self.lengths.items()}
        return LedgerStats(
            dispatched=self.dispatched,
            fates={TRAINED: 0, IN_FLIGHT: 0} | {fate: number for fate, number in self.fates.items() if number},
            refused=dict(self.refused),
            head=self.head_or_none,
            head_batches=self.lineage[self.head].batches if self.head in self.lineage else 0,
            fence=self.fence,
            dispatch_sequence=self.sequence,
            groups_open=len(self.open),
            groups_ready=len(self.ready),
            groups_leased=len(self.leased),
            groups_consumed=len(self.consumed),
            zero_variance_since_commit=self.zero_variance,
            score_sum=self.score_sum,
            score_count=self.score_count,
            payload_bytes=self.payload_bytes,
            revision=self.revision,
            stopped=bool(self.stop_reason),
            lags={lag: n for lag, n in self.lags.items() if n},
            slot_seconds={fate: seconds for fate, seconds in self.slot_seconds.items() if seconds},
            lengths={kind: counts for kind, counts in lengths.items() if counts},
            restarts_waiting=len(self.restarts),
            protection_lost=self.protection_lost,
            groups_waiting=len(self.waiting),
            learner=self.learner,
            learner_silent_s=max(now_s - self.learner_seen_s, 0.0) if self.learner else 0.0,
            epoch=self.epoch,
            suspect=self.suspect,
        )
