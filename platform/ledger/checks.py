"""What both ledgers refuse before they look at their state: requests that no state could make right."""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from headrace.platform.errors import CommitRefused, LedgerError
from headrace.platform.ledger.policy import NO_VERSION
from headrace.platform.records.delivery import Chain, CommitRequest, LedgerLimits, Outcome, Submission
from headrace.platform.records.ids import AttemptId
from headrace.platform.records.status import CancelReason, DropReason, Fate, Purpose

TRAINED = Fate.TRAINED.value
IN_FLIGHT = Fate.IN_FLIGHT.value
_COMMIT_FATES = {TRAINED, *(f"{Fate.DROPPED}:{reason}" for reason in DropReason)}


class NamedFate(NamedTuple):
    """One attempt of a commit, within its group."""

    sample: int
    attempt: int
    fate: str


def dropped(reason: DropReason) -> str:
    """The fate of an episode that was played and is not trained."""
    return f"{Fate.DROPPED}:{reason}"


def ending_fate(submission: Submission) -> str:
    """The fate that a submission without a usable episode ends in."""
    if submission.outcome is Outcome.FAILED:
        return f"{Fate.FAILED}:{submission.owner}"
    return f"{Fate.CANCELLED}:{submission.reason or CancelReason.STOPPED}"


def check_holder(holder: str) -> None:
    """Raises LedgerError for a holder without a name: its leases would be nobody's."""
    if not holder:
        raise LedgerError("whoever holds a lease needs a name")


def check_admission(limits: LedgerLimits, size: int) -> None:
    """Raises LedgerError for a group that could never be trained."""
    if size < max(limits.min_group, 1):
        raise LedgerError(f"a group of {size} can never reach the least group size of {limits.min_group}")


def check_chain(chain: Chain) -> None:
    """Raises LedgerError for a chain without its own head, or with a fate that no commit gives."""
    if chain.head != NO_VERSION and all(version.number != chain.head for version in chain.versions):
        raise LedgerError(f"the chain's head is version {chain.head}, but it does not have that version")
    for group in chain.consumed:
        for member in group.members:
            if member.fate not in _COMMIT_FATES or not 0 <= member.sample < group.size:
                raise LedgerError(f"sample {member.sample} of group {group.group} cannot have ended as {member.fate!r}")


def check_page(limit: int) -> None:
    """Raises LedgerError for a read that could never return anything."""
    if limit < 1:
        raise LedgerError(f"a read of {limit} rows would never come to an end")


def check_submissions(run: str, submissions: Sequence[Submission]) -> None:
    """Refuse what must not enter the books (P3).

    Raises:
        LedgerError: for another run, a purpose other than training, a score that is not finite, a DONE without its
            hash, or an unknown reason of cancellation.
    """
    for submission in submissions:
        attempt_id = submission.attempt_id
        if attempt_id.run != run or attempt_id.purpose is not Purpose.TRAIN:
            raise LedgerError(f"{attempt_id} is no training episode of run {run}: it has no place in its ledger")
        if submission.outcome is Outcome.DONE and not (submission.payload_hash and math.isfinite(submission.score)):
            raise LedgerError(f"{attempt_id} is done, so it needs a payload hash and a finite score")
        if submission.outcome is Outcome.CANCELLED and submission.reason not in ("", *CancelReason):
            raise LedgerError(f"{attempt_id}: unknown reason {submission.reason!r}; use one of {list(CancelReason)}")


def check_drop_reason(reason: str) -> DropReason:
    """The reason, as a member of the closed vocabulary. Raises LedgerError."""
    try:
        return DropReason(reason)
    except ValueError:
        raise LedgerError(f"unknown reason to drop {reason!r}; use one of {list(DropReason)}") from None


def fates_by_group(run: str, request: CommitRequest) -> dict[int, list[NamedFate]]:
    """The attempts that a commit names, by group, in order.

    Raises:
        CommitRefused: for a negative count of batches, an id that is none of this run, or an unknown fate.
    """
    if request.batches < 0:
        raise CommitRefused(f"version {request.number} cannot lie {request.batches} batches after its parent")
    groups: dict[int, list[NamedFate]] = defaultdict(list)
    for text, fate in request.fates.items():
        attempt_id = _parse(text)
        if attempt_id.run != run or attempt_id.purpose is not Purpose.TRAIN or str(attempt_id) != text:
            raise CommitRefused(f"{text} is no training episode of run {run}")
        if fate not in _COMMIT_FATES:
            raise CommitRefused(f"{text} cannot end as {fate!r}; a commit knows {sorted(_COMMIT_FATES)}")
        groups[attempt_id.group].append(NamedFate(attempt_id.sample, attempt_id.attempt, fate))
    return {group: sorted(groups[group]) for group in sorted(groups)}


def _parse(text: str) -> AttemptId:
    try:
        return AttemptId.parse(text)
    except ValueError as error:
        raise CommitRefused(str(error)) from None
