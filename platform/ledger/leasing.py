"""What the learner gets: eviction (P14, P15, P17), early closing (P18), and leases (P20), as steps on the books.

Lag is looked at for every ready group, by the versions that they are filed under, so that it costs what is evicted;
poison and age are looked at for those that are about to be leased.
"""

from collections.abc import Sequence

from headrace.platform.errors import LedgerError
from headrace.platform.ledger import policy
from headrace.platform.ledger.books import Books
from headrace.platform.ledger.checks import dropped
from headrace.platform.ledger.groups import Group, GroupState, Slot
from headrace.platform.ledger.policy import LagView
from headrace.platform.records.delivery import AtRisk, LeasedGroup, LeasedMember, LedgerLimits
from headrace.platform.records.ids import AttemptId
from headrace.platform.records.status import CancelReason, DropReason, Fate


def over_limit(limits: LedgerLimits, lags: LagView, group: Group) -> list[Slot]:
    """The members that leave their group (P15). Under mask all of them do, or none: as long as one has a token within
    the limit, the rewards of the others are part of the baseline."""
    done = group.done
    if not limits.mask_over_lag:
        return [slot for slot in done if lags.over(slot.oldest_version)]
    return done if all(lags.over(slot.newest_version) for slot in done) else []


def lease(books: Books, fence: int, parent: int, ahead: int, count: int) -> list[LeasedGroup]:
    """`count` groups, or none at all, after everything that cannot be trained has left."""
    lags = _view(books, parent, ahead)
    _evict(books, lags)
    if count < 1:
        return []
    if _close_early(books, lags, count):
        _evict(books, lags)
    _drop_unfit(books, count)
    if len(books.ready) < count:
        return []
    target = books.lineage[parent].batches + ahead
    return [_lease_one(books, group, fence, target, lags) for group in books.of(books.ready.first(count))]


def at_risk(books: Books, parent: int, ahead: int, count: int) -> AtRisk:
    """Groups whose last chance is the batch that starts here, and that are not in it. One that would be closed early
    is not lost by it (P18)."""
    lags = _view(books, parent, ahead)
    playing = [group for group in _last_chance(books, lags) if not _may_close(books.limits, group)]
    batch = set(books.ready.first(count))
    ready = [
        group
        for group in books.of(books.ready_versions.where(lags.is_last_chance))
        if group.number not in batch and _group_lag(books, lags, group) == books.limits.max_lag
    ]
    protected = sum(policy.is_protected(books.limits, group.restarts) for group in [*playing, *ready])
    return AtRisk(playing=len(playing), ready=len(ready), protected=protected)


def _view(books: Books, parent: int, ahead: int) -> LagView:
    if parent not in books.lineage:
        raise LedgerError(f"version {parent} was never committed; it cannot be the parent of a batch")
    return books.lag_view(parent, ahead)


def _last_chance(books: Books, lags: LagView) -> list[Group]:
    """Open groups whose version is at the limit exactly, oldest first."""
    return books.of(books.open_versions.where(lags.is_last_chance))


def _group_lag(books: Books, lags: LagView, group: Group) -> int:
    """The lag that decides when the group leaves: of its oldest member, or under mask of its newest token."""
    if books.limits.mask_over_lag:
        return min(lags.of(slot.newest_version) for slot in group.done)
    return max(lags.of(slot.oldest_version) for slot in group.done)


def _evict(books: Books, lags: LagView) -> None:
    """What is over the lag limit leaves, oldest group first."""
    for group in books.of(books.ready_versions.where(lags.over)):
        leaving = over_limit(books.limits, lags, group)
        if leaving:
            books.end_done(group, leaving, dropped(DropReason.LAG))
            _shrink(books, group)


def _shrink(books: Books, group: Group) -> None:
    """A ready group goes on without the members that left, if it can."""
    scores = [slot.score for slot in group.done]
    reason = policy.closing_drop(books.limits, len(scores), min(scores, default=0.0), max(scores, default=0.0))
    if reason is None:
        books.place(group, GroupState.READY)
    elif reason is DropReason.ZERO_VARIANCE:
        books.zero_variance += 1
        books.drop(group, reason)
    else:
        books.drop(group, DropReason.LAG)
        books.lost_to_lag(group)


def _close_early(books: Books, lags: LagView, count: int) -> bool:
    """Close the open groups that are complete but for a few members and have no later chance, if that makes a batch."""
    closing = [group for group in _last_chance(books, lags) if _may_close(books.limits, group)]
    if not closing or len(books.ready) + len(closing) < count:
        return False
    for group in closing:
        books.end_running(group, f"{Fate.CANCELLED}:{CancelReason.LAG}")
        books.close(group)
    return True


def _may_close(limits: LedgerLimits, group: Group) -> bool:
    if not limits.early_missing:
        return False
    scores = [slot.score for slot in group.done]
    return policy.may_close_early(limits, len(group.slots), len(group.running), scores)


def _drop_unfit(books: Books, count: int) -> None:
    """Poison (P3, case Q24) and age (P17) leave, until the next `count` groups are free of them."""
    while unfit := [group for group in books.of(books.ready.first(count)) if _unfit(books, group)]:
        for group in unfit:
            reason = _unfit(books, group)
            if reason is not None:
                books.drop(group, reason)


def _unfit(books: Books, group: Group) -> DropReason | None:
    if group.deliveries >= books.limits.max_deliveries:
        return DropReason.POISON
    too_old = 0 < books.limits.max_age_s < books.now_s - group.dispatched_s
    return DropReason.AGE if too_old else None


def _lease_one(books: Books, group: Group, fence: int, target: int, lags: LagView) -> LeasedGroup:
    books.place(group, GroupState.LEASED)
    group.fence, group.target_batches = fence, target
    group.deliveries += 1
    books.learner_leases.set(group.number, books.now_s + books.limits.learner_lease_s)
    return LeasedGroup(
        group=group.number,
        position=group.position,
        size=len(group.slots),
        version=group.version,
        lag=max(lags.capped(slot.oldest_version) for slot in group.done),
        deliveries=group.deliveries,
        dispatched_s=group.dispatched_s,
        members=_members(books.run, group.number, group.done),
    )


def _members(run: str, number: int, done: Sequence[Slot]) -> tuple[LeasedMember, ...]:
    return tuple(
        LeasedMember(
            attempt_id=AttemptId(run, number, slot.sample, slot.attempt),
            payload=slot.payload,
            payload_hash=slot.payload_hash,
            store_file=slot.store_file,
            score=slot.score,
            oldest_version=slot.oldest_version,
            newest_version=slot.newest_version,
        )
        for slot in done
    )
