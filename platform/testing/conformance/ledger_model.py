"""Random play on a ledger, with the invariants that hold after every step.

A step is a name and three small numbers; what they point at (a group, a version, a lease) is found in what the ledger
has answered so far. So the same steps on two ledgers make the same calls as long as the replies are the same:
compare the traces of `play` to hold an implementation to `MemoryLedger`.
"""

from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from headrace.platform.errors import LedgerError
from headrace.platform.ledger.policy import NO_VERSION, VersionNode, is_ancestor
from headrace.platform.records.delivery import CommitRequest, GroupTicket, LeasedGroup, LedgerLimits, LedgerStats
from headrace.platform.records.status import Fate
from headrace.platform.records.tables import FateRow
from headrace.platform.testing.conformance.ledger_harness import LedgerHarness, limits

MODEL_LIMITS: LedgerLimits = limits(max_lag=2, max_attempts=2, max_deliveries=2)
"""Small enough for every limit to be met within a few steps."""

_SCORES = (0.0, 0.5, 1.0)
_DROPS = ("nan", "fidelity", "nonsense")
_SECONDS = (1.0, 20.0, 61.0)
_FATES_PER_READ = 3


class Step(NamedTuple):
    """One move; `kind` is one of `STEP_KINDS`."""

    kind: str
    a: int = 0
    b: int = 0
    c: int = 0


class _Player:
    """Knows what the ledger has answered."""

    def __init__(self, harness: LedgerHarness) -> None:
        self.h = harness
        self.ledger = harness.ledger
        self.tickets: list[GroupTicket] = []
        self.unfinished: list[GroupTicket] = []
        self.leased: dict[int, LeasedGroup] = {}
        self.fence = 0
        self.stops = 0
        self.staged: list[int] = []
        self.head = NO_VERSION
        self.lineage: dict[int, VersionNode] = {}
        self.trained: dict[str, int] = {}
        self.last_commit: CommitRequest | None = None
        self.fates_read = 0
        self.fates: dict[str, str] = {}

    def _version(self, choice: int) -> int:
        """The head for a small choice, else any version that was ever committed."""
        known = [*self.lineage, self.head]
        return self.head if choice < 3 else known[-choice % len(known)]

    def _some_leased(self, choice: int) -> list[int]:
        groups = sorted(self.leased)
        return groups[: choice + 1] if choice < 4 else [choice]

    # --- workers ------------------------------------------------------------------------------------------------------

    async def admit(self, a: int, b: int, c: int) -> object:
        admission = await self.ledger.admit(self._version(a), b + 1, c + 1)
        self.tickets.extend(admission.tickets)
        self.unfinished.extend(admission.tickets)
        return admission

    async def finish(self, a: int, b: int, c: int) -> object:
        """Put every sample of an unfinished group; `b` spreads the scores, `c` makes a member older."""
        if not self.unfinished:
            return None
        ticket = self.unfinished.pop(a % len(self.unfinished))
        return await self.h.replies(
            *(
                self.h.done(
                    ticket.group, i, _SCORES[(b + 1) * i % 3], self._version(c) if i == 0 and c else ticket.version
                )
                for i in range(ticket.size)
            )
        )

    async def end_one(self, a: int, b: int, c: int) -> object:
        """Put one attempt, as done, failed for good, or failed and retryable; it may be an attempt too many."""
        group = self.tickets[-1 - a % len(self.tickets)].group if self.tickets and a < 5 else a
        attempt, outcome = c % 2, c % 3
        if outcome == 0:
            return await self.h.replies(self.h.done(group, b, _SCORES[b % 3], self.head, attempt))
        return await self.h.replies(self.h.failed(group, b, attempt, retryable=outcome == 1))

    async def cancelled(self, a: int, b: int, c: int) -> object:
        return await self.ledger.cancelled([a, b, c, *(ticket.group for ticket in self.tickets[-4:])])

    # --- the learner --------------------------------------------------------------------------------------------------

    async def acquire(self, a: int, b: int, c: int) -> object:
        fence = await self.ledger.acquire_learner(f"learner {a}")
        expected = self.fence + self.stops + 1
        assert fence == expected, f"fence {fence}, not {expected}, follows {self.fence} and {self.stops} stops"
        self.fence, self.stops = fence, 0
        self.leased.clear()
        self.staged.clear()
        return fence

    async def lease(self, a: int, b: int, c: int) -> object:
        groups = await self.ledger.lease(self.fence - (c == 5), self.head, b % 3, a % 2 + 1)
        for group in groups:
            assert group.lag <= MODEL_LIMITS.max_lag, f"group {group.group} was leased with lag {group.lag}"
            assert group.deliveries <= MODEL_LIMITS.max_deliveries
            self.leased[group.group] = group
        return groups

    async def extend(self, a: int, b: int, c: int) -> None:
        await self.ledger.extend(self.fence, self._some_leased(a))

    async def release(self, a: int, b: int, c: int) -> object:
        groups = self._some_leased(a)
        await self.ledger.release(self.fence, groups)
        return [self.leased.pop(group, None) for group in groups]

    async def drop(self, a: int, b: int, c: int) -> object:
        groups = self._some_leased(a)
        await self.ledger.drop(self.fence, groups, _DROPS[b % 3])
        return [self.leased.pop(group, None) for group in groups]

    async def stage(self, a: int, b: int, c: int) -> object:
        self.staged.append(await self.ledger.stage(self.fence))
        return self.staged[-1]

    async def commit(self, a: int, b: int, c: int) -> object:
        """Publish some leased groups; now and then with a precondition of P7 broken."""
        groups = [self.leased[number] for number in self._some_leased(a) if number in self.leased]
        number = self.staged[-1] if self.staged and c != 5 else await self.ledger.stage(self.fence)
        fate = ("trained", "dropped:spare")[b == 5]
        parent = self.head if c != 4 else self._version(a)
        request = self.h.request(self.fence, number, parent, groups, batches=b % 2, fate=fate)
        await self.ledger.commit(request)
        self._committed(request, groups)
        return number

    def _committed(self, request: CommitRequest, groups: Sequence[LeasedGroup]) -> None:
        before = self.lineage[self.head].batches if self.head != NO_VERSION else 0
        self.lineage[request.number] = VersionNode(self.head, before + request.batches)
        self.head, self.last_commit = request.number, request
        self.staged = [number for number in self.staged if number != request.number]
        for group in groups:
            del self.leased[group.group]
            for member in group.members:
                slot = f"{group.group}.{member.attempt_id.sample}"
                assert slot not in self.trained, f"slot {slot} was consumed by {self.trained[slot]} already (P1)"
                self.trained[slot] = request.number

    async def commit_again(self, a: int, b: int, c: int) -> None:
        if self.last_commit is not None:
            await self.ledger.commit(self.last_commit)

    async def settle(self, a: int, b: int, c: int) -> None:
        """Settle the head: a checkpoint is made of the weights that the learner holds."""
        await self.ledger.settle(self.fence, self.head)

    async def rollback(self, a: int, b: int, c: int) -> object:
        """Resume before the head, from a version on its lineage or off it."""
        version = self._version(a)
        await self.ledger.rollback(self.fence, version)
        self.head = version
        self.leased.clear()
        self.trained = {slot: v for slot, v in self.trained.items() if is_ancestor(self.lineage, v, version)}
        return version

    # --- everybody ----------------------------------------------------------------------------------------------------

    async def advance(self, a: int, b: int, c: int) -> None:
        await self.h.advance(_SECONDS[a % 3])

    async def stop(self, a: int, b: int, c: int) -> None:
        """Rarely: only a new learner's rollback ends it. What the player still holds is Fenced until then."""
        if a == b == c:
            await self.ledger.stop("enough")
            self.stops += 1
            left = await self.ledger.stats()
            assert (left.fates[Fate.IN_FLIGHT], left.groups_leased) == (0, 0), f"in flight after a stop: {left}"

    async def checked(self) -> tuple[Sequence[FateRow], LedgerStats]:
        """The fates that changed and the counts, after every invariant was looked at."""
        rows = await self._changed_fates()
        stats = await self.h.stats()
        assert min(stats.fates.values()) >= 0, f"a fate has a negative count: {stats.fates}"
        assert stats.payload_bytes >= 0
        logged = Counter(self.fates.values())
        ended = Counter({fate: count for fate, count in stats.fates.items() if fate != Fate.IN_FLIGHT and count})
        assert logged == ended, f"the log of fates adds up to {logged}, the counts are {ended} (P3)"
        return rows, stats

    async def _changed_fates(self) -> Sequence[FateRow]:
        """The log since the last call. An attempt ends, and ends again only after a rollback took that back."""
        changed: list[FateRow] = []
        while True:
            rows, position = await self.ledger.fates(self.fates_read, _FATES_PER_READ)
            assert position == self.fates_read + len(rows), f"{len(rows)} rows led to {position}, none may be missing"
            self.fates_read = position
            if not rows:
                return changed
            changed.extend(rows)
            for row in rows:
                before = self.fates.pop(row.episode_id, None)
                assert (before is not None) == (row.fate is Fate.IN_FLIGHT), f"{row} came after {before}"
                assert (row.version is not None) == (row.fate is Fate.TRAINED), f"{row} has the wrong version"
                if row.fate is not Fate.IN_FLIGHT:
                    self.fates[row.episode_id] = f"{row.fate}:{row.reason}".rstrip(":")


_MOVES: dict[str, Callable[[_Player, int, int, int], Coroutine[Any, Any, object]]] = {
    move.__name__: move
    for move in (
        _Player.admit,
        _Player.finish,
        _Player.end_one,
        _Player.cancelled,
        _Player.acquire,
        _Player.lease,
        _Player.extend,
        _Player.release,
        _Player.drop,
        _Player.stage,
        _Player.commit,
        _Player.commit_again,
        _Player.settle,
        _Player.rollback,
        _Player.advance,
        _Player.stop,
    )
}
_OFTEN = {"admit": 6, "finish": 10, "end_one": 2, "lease": 8, "commit": 5}
STEP_KINDS: tuple[str, ...] = tuple(name for name in _MOVES for _ in range(_OFTEN.get(name, 1)))
"""Every kind of step; what a run mostly consists of occurs more often."""


async def play(harness: LedgerHarness, steps: Sequence[Step]) -> list[tuple[object, Sequence[FateRow], LedgerStats]]:
    """Play `steps` from version 0 on, then close the books.

    Returns:
        For each step the reply, or the name of the error, the fates that it changed, and the counts after it.

    Raises:
        AssertionError: an invariant broke.
    """
    player = _Player(harness)
    await player.acquire(0, 0, 0)
    await player.commit(0, 0, 0)
    trace: list[tuple[object, Sequence[FateRow], LedgerStats]] = []
    for step in steps:
        try:
            reply = await _MOVES[step.kind](player, step.a, step.b, step.c)
        except LedgerError as error:
            reply = type(error).__name__
        trace.append((reply, *await player.checked()))
    await harness.ledger.stop("end")
    fates, end = await player.checked()
    trace.append((None, fates, end))
    left = (end.fates["in_flight"], end.groups_open, end.groups_ready, end.groups_leased, end.payload_bytes)
    assert left == (0, 0, 0, 0, 0), f"after the end there is still something in flight: {end}"
    return trace
