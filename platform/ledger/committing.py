"""Publishing a version (P5): the preconditions of P7, and what a commit does to the books."""

from collections.abc import Mapping, Sequence

from headrace.platform.errors import CommitRefused
from headrace.platform.ledger.books import Books
from headrace.platform.ledger.checks import TRAINED, NamedFate
from headrace.platform.ledger.groups import Group
from headrace.platform.ledger.leasing import over_limit
from headrace.platform.ledger.policy import NO_VERSION, LagView, VersionNode
from headrace.platform.records.delivery import CommitRequest


def is_repeated(books: Books, request: CommitRequest) -> bool:
    """Whether this very commit was made before: its reply may have been lost. Raises CommitRefused for another one of
    the same number."""
    known = books.commits.get(request.number)
    if known is None:
        return False
    if known != (request.content_hash, request.fence):
        raise CommitRefused(f"version {request.number} is already committed with another content or fence")
    return True


def commit(books: Books, request: CommitRequest, fates: Mapping[int, Sequence[NamedFate]]) -> None:
    """Publish and consume, or raise CommitRefused and change nothing. The head is left to the caller."""
    if request.parent != books.head:
        raise CommitRefused(f"parent {request.parent} is not the head, {books.head}")
    if request.number not in books.reserved:
        raise CommitRefused(f"version {request.number} was not reserved under fence {request.fence}")
    before = books.lineage[request.parent].batches if request.parent != NO_VERSION else 0
    views: dict[int, LagView] = {}
    for number, named in fates.items():
        group = _leased(books, request, number, named)
        # How far past the commit's parent the batch began that the group was leased for (P14).
        ahead = max(group.target_batches - before, 0)
        lags = views.setdefault(number, books.lag_view(request.parent, ahead))
        if over_limit(books.limits, lags, group):
            raise CommitRefused(f"group {number} is over the lag limit of {books.limits.max_lag}")
    for number, named in fates.items():
        _consume(books, books.groups[number], request.number, named, views[number])
    books.lineage[request.number] = VersionNode(request.parent, before + request.batches)
    books.commits[request.number] = (request.content_hash, request.fence)
    books.reserved.discard(request.number)
    books.zero_variance = 0


def _leased(books: Books, request: CommitRequest, number: int, named: Sequence[NamedFate]) -> Group:
    """The group, if it is leased to this fence and every attempt that was delivered is named once."""
    leased = books.leased_to(request.fence, [number])
    if not leased:
        raise CommitRefused(f"group {number} is not leased to fence {request.fence}")
    delivered = [(slot.sample, slot.attempt) for slot in leased[0].done]
    if delivered != [(sample, attempt) for sample, attempt, _ in named]:
        raise CommitRefused(f"the fates of group {number} do not cover exactly the attempts that were leased")
    return leased[0]


def _consume(books: Books, group: Group, version: int, named: Sequence[NamedFate], lags: LagView) -> None:
    for sample, _, fate in named:
        slot = group.slots[sample]
        slot.lag = lags.capped(slot.oldest_version)
        books.move(group.number, [slot], fate, version if fate == TRAINED else None)
        books.forget_payload(slot)  # P9: the episode store has it
    books.consume(group, version)
