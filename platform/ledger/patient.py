"""A ledger that waits for its server: what went wrong on the way is tried again, within a deadline.

`LedgerAway`, `LedgerRewound` and `DeadlineExceeded` say that a step may or may not have happened. Each method here
knows what that means for it: most may simply be sent again; `put`, `lease` and `drop` look at what the lost reply may
have done; `confirm`, `reconcile` and `durable` are asked once. All other errors are answers and pass at once.

Owns the pauses, the deadline, and saying so: once that it waits, once that it goes on.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from headrace.platform.contracts import Clock, Ledger
from headrace.platform.errors import CommitRefused, DeadlineExceeded, Fenced, LedgerAway, LedgerError
from headrace.platform.records.delivery import (
    Admission,
    AtRisk,
    CancelNotice,
    Chain,
    CommitRequest,
    LeasedGroup,
    LedgerStats,
    PutReply,
    Submission,
    Verdict,
)
from headrace.platform.records.tables import FateRow

T = TypeVar("T")
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0


class PatientLedger:
    """`Ledger` over another one, for a worker or the learner. Its owner closes it, and the other one with it.

    Args:
        ledger: the one that may be away.
        deadline_s: how long one call may wait before the last error is raised.
        say: told that the ledger is away and why, and that it is back.
        held: the groups that the learner holds leases of. Without it, `lease` is not tried again.
        clock: measures waiting, in seconds.
        sleep: how to pause.
    """

    def __init__(
        self,
        ledger: Ledger,
        deadline_s: float,
        say: Callable[[str], None],
        *,
        held: Callable[[], Sequence[int]] | None = None,
        clock: Clock = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._ledger = ledger
        self._deadline_s = deadline_s
        self._say = say
        self._held = held
        self._clock = clock
        self._sleep = sleep
        self._away_since_s: float | None = None
        self.interruptions = 0
        """How often the server was away, or not to be trusted: what it was told before may be lost."""

    @property
    def is_away(self) -> bool:
        """The last call that has come back found no server, or one that must be reconciled."""
        return self._away_since_s is not None

    async def _patiently(
        self, call: Callable[[], Awaitable[T]], again: Callable[[], Awaitable[T]] | None = None, within_s: float = -1.0
    ) -> T:
        """The reply to `call`, or to `again` where a reply may have been lost before."""
        began_s = self._clock()
        deadline_s = within_s if within_s >= 0 else self._deadline_s
        pause_s, attempt = FIRST_PAUSE_S, call
        while True:
            try:
                reply = await attempt()
            except (LedgerAway, DeadlineExceeded) as error:
                self._note_away(error)
                waited_s = self._clock() - began_s
                if waited_s >= deadline_s:
                    raise type(error)(f"{error}; waited {waited_s:.1f} s for the ledger") from error
            else:
                self._note_back()
                return reply
            await self._sleep(min(pause_s, deadline_s - waited_s))
            pause_s, attempt = min(2 * pause_s, LONGEST_PAUSE_S), again or call

    def _note_away(self, error: Exception) -> None:
        if self._away_since_s is None:
            self._away_since_s = self._clock()
            self.interruptions += 1
            self._say(f"waiting for the ledger: {error}")

    def _note_back(self) -> None:
        if self._away_since_s is not None:
            away_s = self._clock() - self._away_since_s
            self._away_since_s = None
            self._say(f"the ledger is back after {away_s:.1f} s")

    # --- workers ------------------------------------------------------------------------------------------------------

    async def admit(self, version: int, size: int, groups: int, holder: str) -> Admission:
        """See `Ledger.admit`. Groups whose tickets were lost are played by others once their lease has run out."""
        return await self._patiently(lambda: self._ledger.admit(version, size, groups, holder))

    async def renew(self, holder: str, groups: Sequence[int]) -> Sequence[CancelNotice]:
        """See `Ledger.renew`."""
        return await self._patiently(lambda: self._ledger.renew(holder, groups))

    async def disown(self, holder: str) -> None:
        """See `Ledger.disown`."""
        await self._patiently(lambda: self._ledger.disown(holder))

    async def put(self, submissions: Sequence[Submission]) -> Sequence[PutReply]:
        """See `Ledger.put`. What a lost reply had accepted is accepted, not a duplicate (P2)."""

        async def again() -> Sequence[PutReply]:
            replies = await self._ledger.put(submissions)
            return [PutReply(Verdict.ACCEPTED) if r.verdict is Verdict.DUPLICATE else r for r in replies]

        return await self._patiently(lambda: self._ledger.put(submissions), again)

    # --- the learner --------------------------------------------------------------------------------------------------

    async def acquire_learner(self, holder: str, takeover: bool = False) -> int:
        """See `Ledger.acquire_learner`. A fence that was lost on the way is followed by a larger one."""
        return await self._patiently(lambda: self._ledger.acquire_learner(holder, takeover))

    async def lease(self, fence: int, parent: int, ahead: int, count: int) -> Sequence[LeasedGroup]:
        """See `Ledger.lease`. Before it is tried again, what a lost reply had granted goes back to the queue."""
        held = self._held
        if held is None:
            return await self._ledger.lease(fence, parent, ahead, count)

        async def again() -> Sequence[LeasedGroup]:
            await self._ledger.extend(fence, held(), exactly=True)
            return await self._ledger.lease(fence, parent, ahead, count)

        return await self._patiently(lambda: self._ledger.lease(fence, parent, ahead, count), again)

    async def at_risk(self, fence: int, parent: int, ahead: int, count: int) -> AtRisk:
        """See `Ledger.at_risk`."""
        return await self._patiently(lambda: self._ledger.at_risk(fence, parent, ahead, count))

    async def extend(self, fence: int, groups: Sequence[int], exactly: bool = False) -> None:
        """See `Ledger.extend`."""
        await self._patiently(lambda: self._ledger.extend(fence, groups, exactly))

    async def release(self, fence: int, groups: Sequence[int]) -> None:
        """See `Ledger.release`."""
        await self._patiently(lambda: self._ledger.release(fence, groups))

    async def drop(self, fence: int, groups: Sequence[int], reason: str) -> None:
        """See `Ledger.drop`. A group that is no longer leased when it is tried again was dropped before."""

        async def again() -> None:
            for group in groups:
                try:
                    await self._ledger.drop(fence, [group], reason)
                except (Fenced, CommitRefused, LedgerAway):
                    raise
                except LedgerError:
                    continue

        await self._patiently(lambda: self._ledger.drop(fence, groups, reason), again)

    async def stage(self, fence: int, floor: int = 0) -> int:
        """See `Ledger.stage`. A number that was lost on the way is never used (P6)."""
        return await self._patiently(lambda: self._ledger.stage(fence, floor))

    async def commit(self, request: CommitRequest) -> None:
        """See `Ledger.commit`. The same commit again is answered alike (P7)."""
        await self._patiently(lambda: self._ledger.commit(request))

    async def settle(self, fence: int, version: int) -> None:
        """See `Ledger.settle`."""
        await self._patiently(lambda: self._ledger.settle(fence, version))

    async def rollback(self, fence: int, version: int) -> None:
        """See `Ledger.rollback`."""
        await self._patiently(lambda: self._ledger.rollback(fence, version))

    # --- everybody ----------------------------------------------------------------------------------------------------

    async def watch_head(self, after: int | None, timeout_s: float) -> int | None:
        """See `Ledger.watch_head`. It waits for a server that is away as long as for a head, and then raises."""
        end_s = self._clock() + timeout_s

        async def watch() -> int | None:
            return await self._ledger.watch_head(after, max(end_s - self._clock(), 0.0))

        return await self._patiently(watch, within_s=timeout_s)

    async def stop(self, reason: str) -> None:
        """See `Ledger.stop`."""
        await self._patiently(lambda: self._ledger.stop(reason))

    async def allow(self, environment: str, versions: Sequence[str]) -> None:
        """See `Ledger.allow`."""
        await self._patiently(lambda: self._ledger.allow(environment, versions))

    async def confirm(self, newest: int, content_hash: str) -> bool:
        """See `Ledger.confirm`. Asked once."""
        return await self._ledger.confirm(newest, content_hash)

    async def reconcile(self, chain: Chain) -> None:
        """See `Ledger.reconcile`. Asked once: whoever reconciles begins again with what is there then."""
        await self._ledger.reconcile(chain)

    async def durable(self, timeout_s: float) -> bool:
        """See `Ledger.durable`. A server that goes away keeps no promise that it gave before (P11)."""
        try:
            return await self._ledger.durable(timeout_s)
        except (LedgerAway, DeadlineExceeded):
            self.interruptions += 1
            return False

    async def stats(self) -> LedgerStats:
        """See `Ledger.stats`."""
        return await self._patiently(self._ledger.stats)

    async def fates(self, after: int, limit: int) -> tuple[Sequence[FateRow], int]:
        """See `Ledger.fates`."""
        return await self._patiently(lambda: self._ledger.fates(after, limit))

    async def close(self) -> None:
        """See `Ledger.close`."""
        await self._ledger.close()
