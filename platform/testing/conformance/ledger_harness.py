"""What the ledger suite plays with: a ledger, its clock, its mishaps, and the usual moves of workers and learner."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from headrace.platform.contracts import Ledger
from headrace.platform.ledger.policy import NO_VERSION
from headrace.platform.records.delivery import (
    CommitRequest,
    GroupTicket,
    LeasedGroup,
    LedgerLimits,
    LedgerStats,
    Outcome,
    PutReply,
    Submission,
    Verdict,
)
from headrace.platform.records.ids import AttemptId
from headrace.platform.records.status import CancelReason, FaultOwner


def limits(**changes: Any) -> LedgerLimits:
    """Limits of the suite: batches of 2 groups, lag limit 1; a minute for a group and for a learner's lease, ten for a
    worker's."""
    usual = {
        "batch_groups": 2,
        "max_lag": 1,
        "group_deadline_s": 60.0,
        "learner_lease_s": 60.0,
        "dispatch_lease_s": 600.0,
    }
    return LedgerLimits(**(usual | changes))


@dataclass(kw_only=True, slots=True)
class LedgerHarness:
    """A fresh ledger of `run`. `advance` lets its time pass by so many seconds without waiting for them.

    The others are what may happen to a server; a ledger without them skips the cases that need them. `mark` returns a
    token for its present state and `rewind` puts that state back, as a server that has lost its last writes; `wipe`
    leaves an empty server, and `restart` one that has lost nothing. None of them tells the client.
    """

    ledger: Ledger
    run: str
    advance: Callable[[float], Awaitable[None]]
    mark: Callable[[], Awaitable[object]] | None = None
    rewind: Callable[[object], Awaitable[None]] | None = None
    wipe: Callable[[], Awaitable[None]] | None = None
    restart: Callable[[], Awaitable[None]] | None = None

    # --- the learner's moves ------------------------------------------------------------------------------------------

    async def begin(self) -> int:
        """Become the learner and publish version 0; returns the fence."""
        fence = await self.ledger.acquire_learner("first")
        await self.publish(fence, NO_VERSION, batches=0)
        return fence

    async def publish(
        self, fence: int, parent: int, groups: Sequence[LeasedGroup] = (), *, batches: int = 1, fate: str = "trained"
    ) -> int:
        """Stage and commit a version that consumed `groups`; returns its number."""
        request = self.request(fence, await self.ledger.stage(fence), parent, groups, batches=batches, fate=fate)
        await self.ledger.commit(request)
        return request.number

    def request(
        self,
        fence: int,
        number: int,
        parent: int,
        groups: Sequence[LeasedGroup] = (),
        *,
        batches: int = 1,
        fate: str = "trained",
    ) -> CommitRequest:
        """A commit whose fates cover `groups`."""
        return CommitRequest(
            fence=fence,
            number=number,
            parent=parent,
            content_hash=f"content-{number}",
            batches=batches,
            fates={str(member.attempt_id): fate for group in groups for member in group.members},
        )

    # --- the workers' moves -------------------------------------------------------------------------------------------

    async def admit(self, version: int, groups: int, size: int = 2, holder: str = "worker") -> Sequence[GroupTicket]:
        """Admit exactly `groups` groups."""
        admission = await self.ledger.admit(version, size, groups, holder)
        assert len(admission.tickets) == groups, f"admitted {len(admission.tickets)} of {groups}: {admission.refusal}"
        return admission.tickets

    def attempt(self, group: int, sample: int, attempt: int = 0) -> AttemptId:
        """An attempt of this run."""
        return AttemptId(self.run, group, sample, attempt)

    def done(
        self,
        group: int,
        sample: int,
        score: float,
        version: int,
        attempt: int = 0,
        *,
        newest: int | None = None,
        environment: str = "",
    ) -> Submission:
        """A finished episode whose action tokens are of `version` to `newest`, which is `version` by default."""
        attempt_id = self.attempt(group, sample, attempt)
        return Submission(
            attempt_id=attempt_id,
            outcome=Outcome.DONE,
            payload=f"payload of {attempt_id}".encode(),
            payload_hash=f"hash of {attempt_id}",
            store_file=f"episodes/{group}.parquet",
            score=score,
            oldest_version=version,
            newest_version=version if newest is None else newest,
            environment=environment,
            action_tokens=3,
        )

    def cancelled(
        self, group: int, sample: int, attempt: int = 0, reason: CancelReason = CancelReason.LAG
    ) -> Submission:
        """An attempt that was stopped before it ended."""
        attempt_id = self.attempt(group, sample, attempt)
        return Submission(attempt_id=attempt_id, outcome=Outcome.CANCELLED, reason=reason)

    def failed(self, group: int, sample: int, attempt: int = 0, *, retryable: bool = True) -> Submission:
        """An attempt that the infrastructure ended."""
        return Submission(
            attempt_id=self.attempt(group, sample, attempt),
            outcome=Outcome.FAILED,
            owner=FaultOwner.INFRASTRUCTURE,
            retryable=retryable,
        )

    async def put(self, *submissions: Submission) -> list[Verdict]:
        """The verdicts of one put."""
        return [reply.verdict for reply in await self.replies(*submissions)]

    async def replies(self, *submissions: Submission) -> Sequence[PutReply]:
        """The replies of one put."""
        return await self.ledger.put(submissions)

    async def finish(self, tickets: Sequence[GroupTicket], scores: Sequence[float] = (0.0, 1.0)) -> None:
        """Put every episode that the tickets ask for; sample i scores `scores[i]`."""
        for ticket in tickets:
            submissions = [
                self.done(ticket.group, sample, scores[sample % len(scores)], ticket.version, attempt)
                for sample, attempt in ticket.attempts
            ]
            verdicts = set(await self.put(*submissions))
            assert verdicts == {Verdict.ACCEPTED}, f"the episodes of group {ticket.group} were answered {verdicts}"

    async def ready(self, version: int, groups: int, size: int = 2) -> list[int]:
        """Admit and finish groups; returns their numbers."""
        tickets = await self.admit(version, groups, size)
        await self.finish(tickets)
        return [ticket.group for ticket in tickets]

    # --- looking ------------------------------------------------------------------------------------------------------

    async def stats(self) -> LedgerStats:
        """The counts; the equation of P3 must hold."""
        stats = await self.ledger.stats()
        assert stats.holds, f"{stats.dispatched} dispatched, but the fates add up to {stats.fates}"
        return stats

    async def expect_fates(self, **expected: int) -> None:
        """Fates other than zero; `dropped_lag` stands for "dropped:lag"."""
        fates = {fate: count for fate, count in (await self.stats()).fates.items() if count}
        wanted = {
            name if name in ("trained", "in_flight") else name.replace("_", ":", 1): n for name, n in expected.items()
        }
        assert fates == wanted, f"fates are {fates}, not {wanted}"


LedgerFactory = Callable[[LedgerLimits], AbstractAsyncContextManager[LedgerHarness]]
LedgerCase = Callable[[LedgerFactory], Awaitable[None]]


async def raises(kind: type[Exception], call: Awaitable[object]) -> str:
    """Assert that `call` raises `kind`; the message."""
    try:
        result = await call
    except kind as error:
        return str(error)
    raise AssertionError(f"expected {kind.__name__}, got {result!r}")


def numbers(groups: Sequence[LeasedGroup]) -> list[int]:
    """The numbers of leased groups, in order."""
    return [group.group for group in groups]
