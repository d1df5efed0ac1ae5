"""Which worker plays what: admission (P19, P20) and dispatch leases (P2), as steps on the books.

A worker that says nothing loses its groups: their running attempts fail, the slots get new attempts, and the groups
wait for another worker, pinned to the version that they began with (P18).
"""

from collections.abc import Sequence

from headrace.platform.ledger import policy
from headrace.platform.ledger.books import LOST, Books
from headrace.platform.ledger.groups import SWEPT, Group, GroupState, Slot
from headrace.platform.ledger.policy import NO_VERSION
from headrace.platform.records.delivery import Admission, CancelNotice, GroupTicket, Refusal
from headrace.platform.records.status import CancelReason, DropReason, Fate


def sweep(books: Books) -> None:
    """What time alone changes: groups over their deadline (case E7), workers and learners that said nothing."""
    for group in books.of(books.deadlines.over(books.now_s)):
        books.end_running(group, LOST)
        books.close(group)
    for number in books.dispatch_leases.over(books.now_s):
        end_dispatch(books, books.groups[number])
    for group in books.of(books.learner_leases.over(books.now_s)):
        books.place(group, GroupState.READY)


def end_dispatch(books: Books, group: Group) -> None:
    """The worker is gone: its attempts have failed, and whatever may be tried again waits for another one (P2)."""
    running = group.running
    books.move(group.number, running, LOST)
    again = [slot for slot in running if policy.may_retry(books.limits, slot.attempt, group.base)]
    books.dispatch(len(again))
    for slot in running:
        slot.end(SWEPT)
    for slot in again:
        slot.start(slot.attempt + 1, None, retried=False)
    books.unhold(group)
    if not again:
        books.close(group)


def disown(books: Books, holder: str) -> None:
    """End all dispatch leases of `holder`."""
    for group in books.of(books.held.under(holder)):
        end_dispatch(books, group)


def renew(books: Books, holder: str, numbers: Sequence[int]) -> list[CancelNotice]:
    """Renew what `holder` still has; the reason for whatever should be abandoned."""
    notices = []
    for number in numbers:
        group = books.groups.get(number)
        if group is None or group.state is not GroupState.OPEN:
            reason: CancelReason | None = CancelReason.STOPPED
        elif group.holder != holder:
            reason = CancelReason.SUPERSEDED
        else:
            books.dispatch_leases.set(number, books.now_s + books.limits.dispatch_lease_s)
            reason = _hopeless(books, group)
            if reason is CancelReason.LAG and books.limits.mask_over_lag:
                reason = None  # P15: newer tokens of the same episode may be within the limit
        if reason is not None:
            notices.append(CancelNotice(number, reason))
    return notices


def _hopeless(books: Books, group: Group) -> CancelReason | None:
    """Why nothing that is sampled from the group's version can be trained any more."""
    if not books.is_on_lineage(group.version, books.head):
        return CancelReason.ROLLED_BACK
    # The next batch starts from the head or later, so this lag can only grow (P15).
    return CancelReason.LAG if books.lag_view(books.head, 0).over(group.version) else None


def admit(books: Books, version: int, size: int, count: int, holder: str) -> Admission:
    """Up to `count` groups: first those that wait for a worker, then tasks lost to lag (P16), then new ones."""
    if books.stop_reason:
        return Admission((), Refusal.STOPPED)
    if books.head == NO_VERSION:
        return Admission((), Refusal.NO_HEAD)
    tickets = _adopt(books, count, holder)
    refusal, room = _room(books, version)
    for _ in range(min(count - len(tickets), room)):
        tickets.append(_begin(books, version, size, holder))
    return Admission(tuple(tickets), Refusal.NONE if tickets else refusal)


def _room(books: Books, version: int) -> tuple[Refusal, int]:
    """How many groups that are not dispatched yet may be played with `version` (P20)."""
    lag = books.lag_view(books.head, 0)
    if lag.over(version) or not books.is_on_lineage(version, books.head):
        return Refusal.STALE_VERSION, 0
    used = len(books.open) + len(books.ready) + len(books.leased)
    room = policy.capacity(books.limits, lag.of(version), used)
    return (Refusal.NONE if room else Refusal.CAPACITY), room


def _adopt(books: Books, count: int, holder: str) -> list[GroupTicket]:
    """Groups that wait, oldest first; they have their room. Those that can no longer be trained end here (P15)."""
    tickets: list[GroupTicket] = []
    for number in books.waiting:
        if len(tickets) >= count:
            break
        group = books.groups[number]
        reason = _hopeless(books, group)
        if reason is not None:
            books.end_running(group, f"{Fate.CANCELLED}:{reason}")
            books.drop(group, DropReason.LAG)
            if reason is CancelReason.LAG:
                books.lost_to_lag(group)
            continue
        for slot in group.running:
            slot.started_s = books.now_s
        books.hold(group, holder)
        tickets.append(_ticket(group))
    return tickets


def _begin(books: Books, version: int, size: int, holder: str) -> GroupTicket:
    """Dispatch a new group, over a task that was lost to lag if there is one."""
    number, base = books.sequence, policy.EPOCH_ATTEMPTS * books.epoch
    position, restarts = books.restarts.popleft() if books.restarts else (number, 0)
    group = Group(
        number=number,
        position=position,
        version=version,
        dispatched_s=books.now_s,
        deadline_s=books.now_s + books.limits.group_deadline_s,
        slots=[Slot(sample=sample, attempt=base, started_s=books.now_s) for sample in range(size)],
        restarts=restarts,
        base=base,
    )
    books.sequence += 1
    books.dispatch(size)
    books.enter(group)
    books.hold(group, holder)
    return _ticket(group)


def _ticket(group: Group) -> GroupTicket:
    return GroupTicket(
        group=group.number,
        position=group.position,
        size=len(group.slots),
        version=group.version,
        dispatched_s=group.dispatched_s,
        deadline_s=group.deadline_s,
        attempts=tuple((slot.sample, slot.attempt) for slot in group.running),
    )
