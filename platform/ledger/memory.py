"""The ledger in memory: the fake for tests, the queue of the in-process runtime, and the reference for the scripts.

Owns one run's books. Every method changes them without awaiting, so each is one atomic step on an event loop (P4).
It is server and client in one: `mark`, `rewind`, `wipe` and `restart` do what may happen to a server, and the ledger
notices as a client of a server would (P8). Nothing survives the process; whoever needs that takes `RedisLedger`.
"""

import asyncio
from collections.abc import Sequence
from copy import deepcopy

from headrace.platform.contracts import Clock
from headrace.platform.errors import Fenced, LedgerError, LedgerRewound
from headrace.platform.ledger import committing, dispatch, leasing, rebuilding
from headrace.platform.ledger.books import Books
from headrace.platform.ledger.checks import (
    check_admission,
    check_chain,
    check_drop_reason,
    check_holder,
    check_page,
    check_submissions,
    fates_by_group,
)
from headrace.platform.ledger.groups import GroupState
from headrace.platform.ledger.policy import NO_VERSION
from headrace.platform.ledger.puts import put_one
from headrace.platform.records.delivery import (
    Admission,
    AtRisk,
    CancelNotice,
    Chain,
    CommitRequest,
    LeasedGroup,
    LedgerLimits,
    LedgerStats,
    PutReply,
    Submission,
)
from headrace.platform.records.tables import FateRow


class MemoryLedger:
    """`Ledger` without a server. `clock` stands for the server's time (P12)."""

    def __init__(self, run: str, limits: LedgerLimits, clock: Clock) -> None:
        self._run = run
        self._limits = limits
        self._clock = clock
        self._books = Books(run=run, limits=limits)
        self._seen = 0
        self._head_moved = asyncio.Event()

    def _begin(self) -> Books:
        """Start a step: the time, a new revision, and what time alone has changed."""
        self._check_trusted()
        return self._next_revision()

    def _next_revision(self) -> Books:
        books = self._books
        books.now_s = self._clock()
        books.revision += 1
        self._seen = books.revision
        dispatch.sweep(books)
        return books

    def _is_rewound(self) -> bool:
        """P8: the server has restarted, or this client has seen more than it knows; it stays so until it is trusted."""
        if self._seen > self._books.revision:
            self._books.suspect = True
        return self._books.suspect

    def _check_trusted(self) -> None:
        if self._is_rewound():
            raise LedgerRewound(f"the ledger of run {self._run} may have lost writes: it must be reconciled first")

    def _begin_fenced(self, fence: int) -> Books:
        self._begin()
        return self._check_fence(fence)

    def _check_fence(self, fence: int) -> Books:
        books = self._books
        if fence != books.fence:
            raise Fenced(
                f"fence {fence} is not the present one, {books.fence}: another learner holds the run, or it was stopped"
            )
        books.learner_seen_s = books.now_s
        return books

    # --- workers ------------------------------------------------------------------------------------------------------

    async def admit(self, version: int, size: int, groups: int, holder: str) -> Admission:
        """See `Ledger.admit`."""
        check_admission(self._limits, size)
        check_holder(holder)
        return dispatch.admit(self._begin(), version, size, groups, holder)

    async def renew(self, holder: str, groups: Sequence[int]) -> Sequence[CancelNotice]:
        """See `Ledger.renew`."""
        check_holder(holder)
        return dispatch.renew(self._begin(), holder, groups)

    async def disown(self, holder: str) -> None:
        """See `Ledger.disown`."""
        check_holder(holder)
        dispatch.disown(self._begin(), holder)

    async def put(self, submissions: Sequence[Submission]) -> Sequence[PutReply]:
        """See `Ledger.put`."""
        check_submissions(self._run, submissions)
        books = self._begin()
        replies = [put_one(books, submission) for submission in submissions]
        books.refused.update(reply.verdict.value for reply in replies if reply.verdict.is_refusal)
        return replies

    async def allow(self, environment: str, versions: Sequence[str]) -> None:
        """See `Ledger.allow`."""
        self._begin().allowed[environment] = frozenset(versions)

    # --- the learner --------------------------------------------------------------------------------------------------

    async def acquire_learner(self, holder: str, takeover: bool = False) -> int:
        """See `Ledger.acquire_learner`."""
        check_holder(holder)
        books = self._begin()
        silent_s = books.now_s - books.learner_seen_s
        if books.learner not in ("", holder) and silent_s < self._limits.learner_term_s and not takeover:
            raise Fenced(
                f"the run is held by learner {books.learner}, last heard of {silent_s:.1f} s ago; end it first, or wait"
                f" until it has said nothing for {self._limits.learner_term_s:g} s"
            )
        books.requeue_leased()
        books.learner, books.learner_seen_s = holder, books.now_s
        return books.raise_fence()

    async def lease(self, fence: int, parent: int, ahead: int, count: int) -> Sequence[LeasedGroup]:
        """See `Ledger.lease`. Raises LedgerError when `parent` was never committed."""
        return leasing.lease(self._begin_fenced(fence), fence, parent, ahead, count)

    async def at_risk(self, fence: int, parent: int, ahead: int, count: int) -> AtRisk:
        """See `Ledger.at_risk`. Raises LedgerError when `parent` was never committed."""
        return leasing.at_risk(self._begin_fenced(fence), parent, ahead, count)

    async def extend(self, fence: int, groups: Sequence[int], exactly: bool = False) -> None:
        """See `Ledger.extend`. Raises LedgerError, changing nothing, when one of `groups` is no longer leased."""
        books = self._begin_fenced(fence)
        for group in books.all_leased_to(fence, groups):
            books.learner_leases.set(group.number, books.now_s + self._limits.learner_lease_s)
        if exactly:
            for number in books.leased:
                if number not in groups:
                    books.place(books.groups[number], GroupState.READY)

    async def release(self, fence: int, groups: Sequence[int]) -> None:
        """See `Ledger.release`. Groups that are no longer leased are passed over."""
        books = self._begin_fenced(fence)
        for group in books.leased_to(fence, groups):
            books.place(group, GroupState.READY)

    async def drop(self, fence: int, groups: Sequence[int], reason: str) -> None:
        """See `Ledger.drop`. Raises LedgerError, changing nothing, for an unknown reason or a group not leased."""
        known = check_drop_reason(reason)
        books = self._begin_fenced(fence)
        for group in books.all_leased_to(fence, groups):
            books.drop(group, known)

    async def stage(self, fence: int, floor: int = 0) -> int:
        """See `Ledger.stage`."""
        books = self._begin_fenced(fence)
        number = max(books.next_number, floor)
        books.next_number = number + 1
        books.reserved.add(number)
        return number

    async def commit(self, request: CommitRequest) -> None:
        """See `Ledger.commit`."""
        fates = fates_by_group(self._run, request)
        books = self._begin()
        if committing.is_repeated(books, request):
            return
        self._check_fence(request.fence)
        committing.commit(books, request, fates)
        self._move_head(request.number)

    def _move_head(self, number: int) -> None:
        self._books.head = number
        self._head_moved.set()
        self._head_moved = asyncio.Event()

    async def settle(self, fence: int, version: int) -> None:
        """See `Ledger.settle`."""
        books = self._begin_fenced(fence)
        self._check_known(version)
        books.finish_settled(version)

    async def rollback(self, fence: int, version: int) -> None:
        """See `Ledger.rollback`. A rollback is a resume: a stopped run admits again."""
        books = self._begin_fenced(fence)
        self._check_known(version)
        books.stop_reason = ""
        books.requeue_leased()
        books.recall_orphans(version)
        self._move_head(version)

    def _check_known(self, version: int) -> None:
        if version not in self._books.lineage:
            raise LedgerError(f"version {version} was never committed")

    # --- after a loss -------------------------------------------------------------------------------------------------

    async def confirm(self, newest: int, content_hash: str) -> bool:
        """See `Ledger.confirm`."""
        books = self._books
        known = newest == NO_VERSION or books.commits.get(newest, ("", 0))[0] == content_hash
        if not known or self._seen > books.revision:
            return False
        books.now_s = self._clock()
        rebuilding.fresh_terms(books)
        self._next_revision()
        return True

    async def reconcile(self, chain: Chain) -> None:
        """See `Ledger.reconcile`."""
        check_chain(chain)
        self._books.now_s = self._clock()
        rebuilding.reconcile(self._books, chain)
        self._seen = max(self._seen, self._books.revision)
        self._move_head(chain.head)

    async def durable(self, timeout_s: float) -> bool:
        """See `Ledger.durable`: memory keeps all that it was told."""
        return True

    async def mark(self) -> Books:
        """A copy of what the server knows now."""
        return deepcopy(self._books)

    async def rewind(self, books: object) -> None:
        """The server is back with what it knew at a `mark`. The client keeps what it has seen."""
        assert isinstance(books, Books)
        self._books = deepcopy(books)

    async def wipe(self) -> None:
        """The server is back without anything."""
        self._books = Books(run=self._run, limits=self._limits)

    async def restart(self) -> None:
        """The server is back, with everything."""
        self._books.suspect = True

    # --- everybody ----------------------------------------------------------------------------------------------------

    async def watch_head(self, after: int | None, timeout_s: float) -> int | None:
        """See `Ledger.watch_head`."""
        self._check_trusted()
        try:
            async with asyncio.timeout(timeout_s):
                while self._books.head_or_none == after:
                    await self._head_moved.wait()
        except TimeoutError:
            pass
        self._check_trusted()
        return self._books.head_or_none

    async def stop(self, reason: str) -> None:
        """See `Ledger.stop`."""
        self._begin().stop(reason)

    async def stats(self) -> LedgerStats:
        """See `Ledger.stats`. Of a suspect ledger they are what it had at its last step."""
        if not self._is_rewound():
            self._next_revision()
        return self._books.stats(self._clock())

    async def fates(self, after: int, limit: int) -> tuple[Sequence[FateRow], int]:
        """See `Ledger.fates`."""
        check_page(limit)
        return self._begin().fate_log.read(after, limit)

    async def close(self) -> None:
        """Nothing to release."""
