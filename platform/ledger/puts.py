"""The verdict on what a worker puts (P2), carried out on the books."""

from headrace.platform.ledger import policy
from headrace.platform.ledger.books import Books
from headrace.platform.ledger.checks import dropped, ending_fate
from headrace.platform.ledger.groups import Group, GroupState, Slot, SlotState
from headrace.platform.records.delivery import Outcome, PutReply, Submission, Verdict
from headrace.platform.records.status import CancelReason, DropReason, Fate

_CANCELLED_FOR_LAG = f"{Fate.CANCELLED}:{CancelReason.LAG}"


def put_one(books: Books, submission: Submission) -> PutReply:
    """End one attempt, or refuse to."""
    attempt_id = submission.attempt_id
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
    if not group.holder:
        # Nobody was given this attempt: it is one that a ledger gave out before it lost its last writes.
        return PutReply(Verdict.SUPERSEDED)
    return _end_attempt(books, group, slot, submission)


def _before_present(slot: Slot, submission: Submission) -> PutReply:
    """The reply to an attempt older than the slot's present one."""
    follows = slot.retried and slot.attempt == submission.attempt_id.attempt + 1
    if follows and slot.state is SlotState.RUNNING and submission.outcome is Outcome.FAILED:
        # The reply that named the present attempt may have been lost, and nobody else would play it (P7's manner).
        return PutReply(Verdict.RETRY, slot.attempt)
    return PutReply(Verdict.SUPERSEDED)


def _again(group: Group, slot: Slot, submission: Submission) -> Verdict:
    """The verdict on an attempt that has ended before."""
    if submission.payload_hash == slot.payload_hash:
        return Verdict.DUPLICATE
    if group.state is not GroupState.OPEN and slot.state is SlotState.ENDED:
        return Verdict.GROUP_CLOSED
    return Verdict.CONFLICT


def _end_attempt(books: Books, group: Group, slot: Slot, submission: Submission) -> PutReply:
    fate = "" if submission.outcome is Outcome.DONE else ending_fate(submission)
    if not fate:
        _keep(books, group, slot, submission)
    else:
        books.move(group.number, [slot], fate)
        retry = submission.outcome is Outcome.FAILED and submission.retryable
        if retry and policy.may_retry(books.limits, slot.attempt, group.base):
            slot.start(slot.attempt + 1, books.now_s, retried=True)
            books.dispatch(1)
            return PutReply(Verdict.RETRY, slot.attempt)
        slot.end(submission.payload_hash)
    if not group.running:
        reason = books.close(group)
        if fate == _CANCELLED_FOR_LAG and reason is DropReason.TOO_FEW:
            books.lost_to_lag(group)
    return PutReply(Verdict.ACCEPTED)


def _keep(books: Books, group: Group, slot: Slot, submission: Submission) -> None:
    """Take up an episode, unless its environment is of a version that may not be trained on (P17)."""
    books.score_sum += submission.score
    books.score_count += 1
    slot.seconds = slot.played_s(books.now_s)
    if not _may_join(books, group, submission.environment):
        books.move(group.number, [slot], dropped(DropReason.ENVIRONMENT))
        slot.end(submission.payload_hash)
        return
    group.environment = group.environment or submission.environment
    slot.state = SlotState.DONE
    slot.payload_hash, slot.payload = submission.payload_hash, submission.payload
    slot.store_file, slot.score = submission.store_file, submission.score
    slot.oldest_version, slot.newest_version = submission.oldest_version, submission.newest_version
    books.payload_bytes += len(submission.payload)


def _may_join(books: Books, group: Group, environment: str) -> bool:
    if not environment:
        return True
    name, _, version = environment.rpartition("@")
    allowed = books.allowed.get(name)
    return (allowed is None or version in allowed) and group.environment in ("", environment)
