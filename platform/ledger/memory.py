"""The ledger in memory: the fake for tests, the queue of the in-process runtime, and the reference for the scripts.

Owns one run's books. Every method changes them without awaiting, so each is one atomic step on an event loop (P4).
Nothing survives the process; whoever needs that takes `RedisLedger`.
"""

import asyncio
from collections.abc import Sequence

from headrace.platform.contracts import Clock
from headrace.platform.errors import CommitRefused, Fenced, LedgerError
from headrace.platform.ledger import policy
from headrace.platform.ledger.books import Books, Group, GroupState, Slot, SlotState
from headrace.platform.ledger.checks import (
    IN_FLIGHT,
    TRAINED,
    NamedFate,
    check_admission,
    check_drop_reason,
    check_page,
    check_submissions,
    ending_fate,
    fates_by_group,
)
from headrace.platform.ledger.policy import NO_VERSION, VersionNode
from headrace.platform.records.delivery import (
    Admission,
    CancelNotice,
    CommitRequest,
    GroupTicket,
    LeasedGroup,
    LeasedMember,
    LedgerLimits,
    LedgerStats,
    Outcome,
    PutReply,
    Refusal,
    Submission,
    Verdict,
)
from headrace.platform.records.ids import AttemptId
from headrace.platform.records.status import CancelReason, DropReason
from headrace.platform.records.tables import FateRow


class MemoryLedger:
    """`Ledger` without a server. `clock` stands for the server's time (P12)."""

    def __init__(self, run: str, limits: LedgerLimits, clock: Clock) -> None:
        self._run = run
        self._limits = limits
        self._clock = clock
        self._books = Books(run=run, limits=limits)
        self._head_moved = asyncio.Event()

    def _begin(self) -> float:
        """Start a step: the time, a new revision (P8), and what time alone has changed."""
        now_s = self._clock()
        self._books.revision += 1
        self._books.sweep(now_s)
        return now_s

    def _begin_fenced(self, fence: int) -> float:
        now_s = self._begin()
        self._check_fence(fence)
        return now_s

    def _check_fence(self, fence: int) -> None:
        present = self._books.fence
        if fence != present:
            raise Fenced(
                f"fence {fence} is not the present one, {present}: another learner holds the run, or it was stopped"
            )

    # --- workers ------------------------------------------------------------------------------------------------------

    async def admit(self, version: int, size: int, groups: int) -> Admission:
        """See `Ledger.admit`."""
        check_admission(self._limits, size)
        now_s = self._begin()
        books = self._books
        refusal, room = self._room(version)
        tickets = []
        for _ in range(min(groups, room)):
            deadline_s = now_s + self._limits.group_deadline_s
            group = Group(
                number=books.sequence,
                version=version,
                dispatched_s=now_s,
                deadline_s=deadline_s,
                slots=[Slot(sample=sample) for sample in range(size)],
            )
            books.groups[group.number] = group
            books.sequence += 1
            books.dispatch(size)
            tickets.append(
                GroupTicket(group=group.number, size=size, version=version, dispatched_s=now_s, deadline_s=deadline_s)
            )
        return Admission(tuple(tickets), refusal)

    def _room(self, version: int) -> tuple[Refusal, int]:
        books = self._books
        if books.stop_reason:
            return Refusal.STOPPED, 0
        if books.head == NO_VERSION:
            return Refusal.NO_HEAD, 0
        lag = policy.path_lag(books.lineage, books.head, 0, version, self._limits.max_lag)
        if lag > self._limits.max_lag or not policy.is_ancestor(books.lineage, version, books.head):
            return Refusal.STALE_VERSION, 0
        used = sum(group.state is not GroupState.CONSUMED for group in books.groups.values())
        room = policy.capacity(self._limits, lag, used)
        return (Refusal.NONE if room else Refusal.CAPACITY), room

    async def put(self, submissions: Sequence[Submission]) -> Sequence[PutReply]:
        """See `Ledger.put`."""
        check_submissions(self._run, submissions)
        self._begin()
        replies = [self._put_one(submission) for submission in submissions]
        self._books.refused.update(reply.verdict.value for reply in replies if reply.verdict.is_refusal)
        return replies

    def _put_one(self, submission: Submission) -> PutReply:
        """The verdict of P2 on one submission, carried out."""
        books, attempt_id = self._books, submission.attempt_id
        group = books.groups.get(attempt_id.group)
        if group is None:
            return PutReply(Verdict.LATE if 0 <= attempt_id.group < books.sequence else Verdict.CONFLICT)
        if not 0 <= attempt_id.sample < len(group.slots):
            return PutReply(Verdict.CONFLICT)
        slot = group.slots[attempt_id.sample]
        if attempt_id.attempt < slot.attempt:
            return _before_present(slot, submission)
        if attempt_id.attempt > slot.attempt:
            return PutReply(Verdict.CONFLICT)
        if slot.state is not SlotState.RUNNING:
            return PutReply(_again(group, slot, submission))
        return self._end_attempt(group, slot, submission)

    def _end_attempt(self, group: Group, slot: Slot, submission: Submission) -> PutReply:
        books = self._books
        if submission.outcome is Outcome.DONE:
            slot.state = SlotState.DONE
            slot.payload_hash, slot.payload = submission.payload_hash, submission.payload
            slot.store_file, slot.score = submission.store_file, submission.score
            slot.oldest_version = submission.oldest_version
            books.score_sum += submission.score
            books.score_count += 1
        else:
            books.move(group, [slot], IN_FLIGHT, ending_fate(submission))
            retry = submission.outcome is Outcome.FAILED and submission.retryable
            if retry and slot.attempt + 1 < self._limits.max_attempts:
                slot.attempt += 1
                books.dispatch(1)
                return PutReply(Verdict.RETRY, slot.attempt)
            slot.state, slot.payload_hash = SlotState.ENDED, submission.payload_hash
        if not group.running:
            books.close(group)
        return PutReply(Verdict.ACCEPTED)

    async def cancelled(self, groups: Sequence[int]) -> Sequence[CancelNotice]:
        """See `Ledger.cancelled`."""
        self._begin()
        notices = ((number, self._cancel_reason(number)) for number in groups)
        return [CancelNotice(number, reason) for number, reason in notices if reason is not None]

    def _cancel_reason(self, number: int) -> CancelReason | None:
        books = self._books
        group = books.groups.get(number)
        if group is None or group.state is not GroupState.OPEN:
            return CancelReason.STOPPED
        if not policy.is_ancestor(books.lineage, group.version, books.head):
            return CancelReason.ROLLED_BACK
        # The next batch starts from the head or later, so this lag can only grow (P15).
        lag = policy.path_lag(books.lineage, books.head, 0, group.version, self._limits.max_lag)
        return CancelReason.LAG if lag > self._limits.max_lag else None

    # --- the learner --------------------------------------------------------------------------------------------------

    async def acquire_learner(self, holder: str) -> int:
        """See `Ledger.acquire_learner`."""
        self._begin()
        books = self._books
        for group in books.in_state(GroupState.LEASED):
            books.requeue(group)
        return books.raise_fence()

    async def lease(self, fence: int, parent: int, ahead: int, count: int) -> Sequence[LeasedGroup]:
        """See `Ledger.lease`."""
        now_s = self._begin_fenced(fence)
        books = self._books
        if parent not in books.lineage:
            raise LedgerError(f"version {parent} was never committed; it cannot be the parent of a batch")
        lags = {}
        for group in books.in_state(GroupState.READY):
            lags[group.number] = books.lag(group, parent, ahead)
            if lags[group.number] > self._limits.max_lag:
                books.drop(group, DropReason.LAG)
            elif group.deliveries >= self._limits.max_deliveries:
                books.drop(group, DropReason.POISON)
        ready = sorted(books.in_state(GroupState.READY), key=lambda group: group.number)
        if not 0 < count <= len(ready):
            return []
        for group in ready[:count]:
            group.state, group.fence = GroupState.LEASED, fence
            group.deliveries += 1
            group.lease_until_s = now_s + self._limits.learner_lease_s
            group.target_batches = books.lineage[parent].batches + ahead
        return [self._leased(group, lags[group.number]) for group in ready[:count]]

    def _leased(self, group: Group, lag: int) -> LeasedGroup:
        members = tuple(
            LeasedMember(
                attempt_id=AttemptId(self._run, group.number, sample, slot.attempt),
                payload=slot.payload,
                store_file=slot.store_file,
                score=slot.score,
                oldest_version=slot.oldest_version,
            )
            for sample, slot in enumerate(group.slots)
            if slot.state is SlotState.DONE
        )
        return LeasedGroup(
            group=group.number,
            version=group.version,
            lag=lag,
            deliveries=group.deliveries,
            dispatched_s=group.dispatched_s,
            members=members,
        )

    async def extend(self, fence: int, groups: Sequence[int]) -> None:
        """See `Ledger.extend`. Raises LedgerError, changing nothing, when one of `groups` is no longer leased."""
        now_s = self._begin_fenced(fence)
        for group in self._books.all_leased_to(fence, groups):
            group.lease_until_s = now_s + self._limits.learner_lease_s

    async def release(self, fence: int, groups: Sequence[int]) -> None:
        """See `Ledger.release`. Groups that are no longer leased are passed over."""
        self._begin_fenced(fence)
        for group in self._books.leased_to(fence, groups):
            self._books.requeue(group)

    async def drop(self, fence: int, groups: Sequence[int], reason: str) -> None:
        """See `Ledger.drop`. Raises LedgerError, changing nothing, for an unknown reason or a group not leased."""
        known = check_drop_reason(reason)
        self._begin_fenced(fence)
        for group in self._books.all_leased_to(fence, groups):
            self._books.drop(group, known)

    async def stage(self, fence: int) -> int:
        """See `Ledger.stage`."""
        self._begin_fenced(fence)
        self._books.last_number += 1
        self._books.reserved.add(self._books.last_number)
        return self._books.last_number

    async def commit(self, request: CommitRequest) -> None:
        """See `Ledger.commit`."""
        fates = fates_by_group(self._run, request)
        self._begin()
        books = self._books
        if request.number in books.commits:
            if books.commits[request.number] == (request.content_hash, request.fence):
                return
            raise CommitRefused(f"version {request.number} is already committed with another content or fence")
        self._check_fence(request.fence)
        if request.parent != books.head:
            raise CommitRefused(f"parent {request.parent} is not the head, {books.head}")
        if request.number not in books.reserved:
            raise CommitRefused(f"version {request.number} was not reserved under fence {request.fence}")
        for number, named in fates.items():
            self._check_named(request, number, named)
        for number, named in fates.items():
            self._consume(books.groups[number], request.number, named)
        self._publish(request)

    def _check_named(self, request: CommitRequest, number: int, named: list[NamedFate]) -> None:
        """P7 for one group: leased to this fence, every delivered attempt named once, lag within the limit."""
        leased = self._books.leased_to(request.fence, [number])
        if not leased:
            raise CommitRefused(f"group {number} is not leased to fence {request.fence}")
        group = leased[0]
        delivered = [(sample, slot.attempt) for sample, slot in enumerate(group.slots) if slot.state is SlotState.DONE]
        if delivered != [(sample, attempt) for sample, attempt, _ in named]:
            raise CommitRefused(f"the fates of group {number} do not cover exactly the attempts that were leased")
        batches = self._books.lineage[request.parent].batches
        if self._books.lag(group, request.parent, max(group.target_batches - batches, 0)) > self._limits.max_lag:
            raise CommitRefused(f"group {number} is over the lag limit of {self._limits.max_lag}")

    def _consume(self, group: Group, version: int, named: list[NamedFate]) -> None:
        for sample, _, fate in named:
            slot = group.slots[sample]
            self._books.move(group, [slot], IN_FLIGHT, fate, version if fate == TRAINED else None)
            slot.fate, slot.payload = fate, b""  # P9: the episode store has it
        group.state, group.consumed_by, group.deliveries = GroupState.CONSUMED, version, 0

    def _publish(self, request: CommitRequest) -> None:
        books = self._books
        before = books.lineage[request.parent].batches if request.parent != NO_VERSION else 0
        books.lineage[request.number] = VersionNode(request.parent, before + request.batches)
        books.commits[request.number] = (request.content_hash, request.fence)
        books.reserved.discard(request.number)
        books.zero_variance = 0
        self._move_head(request.number)

    def _move_head(self, number: int) -> None:
        self._books.head = number
        self._head_moved.set()
        self._head_moved = asyncio.Event()

    async def settle(self, fence: int, version: int) -> None:
        """See `Ledger.settle`."""
        self._begin_fenced(fence)
        books = self._books
        self._known(version)
        for group in books.in_state(GroupState.CONSUMED):
            if policy.is_ancestor(books.lineage, group.consumed_by, version):
                del books.groups[group.number]

    async def rollback(self, fence: int, version: int) -> None:
        """See `Ledger.rollback`. A rollback is a resume: a stopped run admits again."""
        self._begin_fenced(fence)
        books = self._books
        self._known(version)
        books.stop_reason = ""
        for group in books.in_state(GroupState.LEASED):
            books.requeue(group)
        for group in books.in_state(GroupState.CONSUMED):
            if not policy.is_ancestor(books.lineage, group.consumed_by, version):
                for slot in group.done:
                    books.move(group, [slot], slot.fate, IN_FLIGHT)
                    slot.fate = ""
                books.requeue(group)
        self._move_head(version)

    def _known(self, version: int) -> None:
        if version not in self._books.lineage:
            raise LedgerError(f"version {version} was never committed")

    # --- everybody ----------------------------------------------------------------------------------------------------

    async def watch_head(self, after: int | None, timeout_s: float) -> int | None:
        """See `Ledger.watch_head`."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._books.head_or_none == after:
                    await self._head_moved.wait()
        except TimeoutError:
            pass
        return self._books.head_or_none

    async def stop(self, reason: str) -> None:
        """See `Ledger.stop`."""
        self._begin()
        self._books.stop(reason)

    async def stats(self) -> LedgerStats:
        """See `Ledger.stats`."""
        self._begin()
        return self._books.stats()

    async def fates(self, after: int, limit: int) -> tuple[Sequence[FateRow], int]:
        """See `Ledger.fates`."""
        check_page(limit)
        self._begin()
        return self._books.fate_log.read(after, limit)

    async def close(self) -> None:
        """Nothing to release."""


def _before_present(slot: Slot, submission: Submission) -> PutReply:
    """The reply to an attempt older than the slot's present one (P2)."""
    follows = slot.attempt == submission.attempt_id.attempt + 1
    if follows and slot.state is SlotState.RUNNING and submission.outcome is Outcome.FAILED:
        # The reply that named the present attempt may have been lost, and nobody else would play it (P7's manner).
        return PutReply(Verdict.RETRY, slot.attempt)
    return PutReply(Verdict.SUPERSEDED)


def _again(group: Group, slot: Slot, submission: Submission) -> Verdict:
    """The verdict on an attempt that has ended before (P2)."""
    if submission.payload_hash == slot.payload_hash:
        return Verdict.DUPLICATE
    if group.state is not GroupState.OPEN and slot.state is SlotState.ENDED:
        return Verdict.GROUP_CLOSED
    return Verdict.CONFLICT
