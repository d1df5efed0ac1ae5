"""Somebody who plays at random on a ledger, and knows what must be true of its answers.

A move has three small numbers; what they point at (a group, a version, a lease) is found in what the ledger has
answered so far. So the same moves on two ledgers make the same calls as long as the replies are the same. The player
also keeps what a run root would: manifests, checkpoints and fate rows; from them a ledger that lost writes is rebuilt.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from headrace.platform.ledger.policy import NO_VERSION, VersionNode, is_ancestor
from headrace.platform.records.delivery import (
    CommitRequest,
    GroupTicket,
    LeasedGroup,
    LedgerLimits,
    LedgerStats,
    PutReply,
    Submission,
    Verdict,
)
from headrace.platform.records.status import Fate
from headrace.platform.records.tables import FateRow
from headrace.platform.testing.conformance.ledger_harness import LedgerHarness
from headrace.platform.testing.conformance.ledger_run_root import RunRoot

_SCORES = (0.0, 0.5, 1.0)
_DROPS = ("nan", "fidelity", "nonsense")
_SECONDS = (1.0, 20.0, 61.0)
_HOLDERS = ("one", "two")
_ENVIRONMENTS = ("", "", "", "", "shop@1", "shop@2")
_FATES_PER_READ = 3


@dataclass(slots=True)
class FateReader:
    """What the log of fates has said: how every attempt ended, by episode id. `unlogged` ended before the log began."""

    position: int = 0
    ends: dict[str, str] = field(default_factory=dict)
    unlogged: Counter[str] = field(default_factory=Counter)

    def copy(self) -> "FateReader":
        """As it is now."""
        return FateReader(self.position, dict(self.ends), Counter(self.unlogged))

    def take(self, rows: Sequence[FateRow]) -> None:
        """An attempt ends, and ends again only after that was taken back."""
        for row in rows:
            before = self.ends.pop(row.episode_id, None)
            assert (before is not None) == (row.fate is Fate.IN_FLIGHT), f"{row} came after {before}"
            assert (row.version is not None) == (row.fate is Fate.TRAINED), f"{row} has the wrong version"
            if row.fate is not Fate.IN_FLIGHT:
                self.ends[row.episode_id] = f"{row.fate}:{row.reason}".rstrip(":")


class Player:
    """Workers, learner and bystanders in one. Every public method that takes `a, b, c` is a move."""

    def __init__(self, harness: LedgerHarness, limits: LedgerLimits) -> None:
        self.h = harness
        self.ledger = harness.ledger
        self.limits = limits
        self.root = RunRoot(harness.run, limits)
        self.log = FateReader()
        self.tickets: list[GroupTicket] = []
        self.unfinished: list[GroupTicket] = []
        self.given: set[tuple[int, int, int]] = set()
        self.leased: dict[int, LeasedGroup] = {}
        self.fence = 0
        self.highest_fence = 0
        self.staged: list[int] = []
        self.head = NO_VERSION
        self.lineage: dict[int, VersionNode] = {}
        self.trained: dict[str, int] = {}
        self.last_commit: CommitRequest | None = None
        self.epoch = 0
        self.marked: tuple[object, FateReader] | None = None

    def _version(self, choice: int) -> int:
        """The head for a small choice, else any version that was ever committed."""
        known = [*self.lineage, self.head]
        return self.head if choice < 3 else known[-choice % len(known)]

    def _some_leased(self, choice: int) -> list[int]:
        groups = sorted(self.leased)
        return groups[: choice + 1] if choice < 4 else [choice]

    # --- workers ------------------------------------------------------------------------------------------------------

    async def admit(self, a: int, b: int, c: int) -> object:
        """One of two workers asks for groups."""
        admission = await self.ledger.admit(self._version(a), b + 1, c + 1, _HOLDERS[(a + b) % 2])
        assert len(admission.tickets) <= c + 1
        for ticket in admission.tickets:
            attempts = {(ticket.group, *attempt) for attempt in ticket.attempts}
            assert attempts and not attempts & self.given, f"{ticket} was given out before (P2)"
            self.given |= attempts
            self.unfinished = [other for other in self.unfinished if other.group != ticket.group]
        self.tickets.extend(admission.tickets)
        self.unfinished.extend(admission.tickets)
        return admission

    async def finish(self, a: int, b: int, c: int) -> object:
        """Put what is left of an unfinished group; `b` spreads the scores, `c` makes a member older."""
        if not self.unfinished:
            return None
        ticket = self.unfinished.pop(a % len(self.unfinished))
        return await self._put(
            *(
                self.h.done(
                    ticket.group,
                    i,
                    _SCORES[(b + 1) * i % 3],
                    self._version(c) if i == 0 and c else ticket.version,
                    attempt,
                    newest=self.head if c % 2 else None,
                    environment=_ENVIRONMENTS[a] if i else "",
                )
                for i, attempt in ticket.attempts
            )
        )

    async def end_one(self, a: int, b: int, c: int) -> object:
        """Put one attempt, as done, cancelled, or failed; it may be an attempt too many."""
        ticket = self.tickets[-1 - a % len(self.tickets)] if self.tickets and a < 5 else None
        group, first = (ticket.group, min(attempt for _, attempt in ticket.attempts)) if ticket else (a, 0)
        attempt, outcome = first + c // 2 % 2, c % 4
        if outcome == 0:
            return await self._put(self.h.done(group, b, _SCORES[b % 3], self.head, attempt))
        if outcome == 1:
            return await self._put(self.h.cancelled(group, b, attempt))
        return await self._put(self.h.failed(group, b, attempt, retryable=outcome == 2))

    async def _put(self, *submissions: Submission) -> Sequence[PutReply]:
        replies = await self.h.replies(*submissions)
        for submission, reply in zip(submissions, replies, strict=True):
            if reply.verdict is Verdict.RETRY:
                self._retry(submission.attempt_id.group, submission.attempt_id.sample, reply.next_attempt)
        return replies

    def _retry(self, group: int, sample: int, attempt: int) -> None:
        """Whoever plays the group plays the next attempt of the slot."""
        self.given.add((group, sample, attempt))
        self.unfinished = [
            replace(ticket, attempts=tuple(sorted({**dict(ticket.attempts), sample: attempt}.items())))
            if ticket.group == group
            else ticket
            for ticket in self.unfinished
        ]

    async def renew(self, a: int, b: int, c: int) -> object:
        """A worker renews what it may have."""
        return await self.ledger.renew(_HOLDERS[a % 2], [a, b, c, *(ticket.group for ticket in self.tickets[-4:])])

    async def disown(self, a: int, b: int, c: int) -> None:
        """A worker is gone."""
        await self.ledger.disown(_HOLDERS[a % 2])

    async def allow(self, a: int, b: int, c: int) -> None:
        """The versions of an environment that may be trained on change."""
        await self.ledger.allow("shop", ["1", "2"][: a + 1])

    # --- the learner --------------------------------------------------------------------------------------------------

    async def acquire(self, a: int, b: int, c: int) -> object:
        """One of two learners takes the run, or tries to."""
        fence = await self.ledger.acquire_learner(f"learner {a % 2}", takeover=b % 2 == 0)
        assert fence == self.highest_fence + 1, f"fence {fence} follows {self.highest_fence}"
        self.fence = self.highest_fence = fence
        self.leased.clear()
        self.staged.clear()
        return fence

    async def lease(self, a: int, b: int, c: int) -> object:
        """Ask for a batch; now and then under an old fence."""
        groups = await self.ledger.lease(self.fence - (c == 5), self.head, b % 3, a % 2 + 1)
        for group in groups:
            assert group.lag <= self.limits.max_lag, f"group {group.group} was leased with lag {group.lag} (P14)"
            assert group.deliveries <= self.limits.max_deliveries
            assert len({(member.attempt_id.sample) for member in group.members}) == len(group.members) > 0
            self.leased[group.group] = group
        return groups

    async def at_risk(self, a: int, b: int, c: int) -> object:
        """Ask what the next batch would lose."""
        return await self.ledger.at_risk(self.fence, self._version(c), b % 3, a % 3)

    async def extend(self, a: int, b: int, c: int) -> None:
        """Renew leases, perhaps naming all of them."""
        groups, exactly = self._some_leased(a), c % 2 == 1
        await self.ledger.extend(self.fence, groups, exactly)
        if exactly:
            self.leased = {number: group for number, group in self.leased.items() if number in groups}

    async def release(self, a: int, b: int, c: int) -> object:
        """Give leases back."""
        groups = self._some_leased(a)
        await self.ledger.release(self.fence, groups)
        return [self.leased.pop(group, None) for group in groups]

    async def drop(self, a: int, b: int, c: int) -> object:
        """Drop leased groups; now and then for no known reason."""
        groups = self._some_leased(a)
        await self.ledger.drop(self.fence, groups, _DROPS[b % 3])
        return [self.leased.pop(group, None) for group in groups]

    async def stage(self, a: int, b: int, c: int) -> object:
        """Reserve a number, perhaps above a floor."""
        number = await self.ledger.stage(self.fence, a + b)
        assert number > self.root.highest, f"version number {number} was used before, up to {self.root.highest} (P6)"
        self.root.highest = number
        self.staged.append(number)
        return number

    async def commit(self, a: int, b: int, c: int) -> object:
        """Publish some leased groups: the manifest, then the commit. Now and then a precondition of P7 is broken, or
        the learner dies between the two."""
        groups = [self.leased[number] for number in self._some_leased(a) if number in self.leased]
        if not self.staged or c == 5:
            await self.stage(0, 0, 0)
        number = self.staged.pop()
        fate = ("trained", "dropped:spare")[b == 5]
        parent = self.head if c != 4 else self._version(a)
        request = self.h.request(self.fence, number, parent, groups, batches=b % 2, fate=fate)
        self.root.write_manifest(request, groups)
        if (a, c) == (2, 3):
            return None
        await self.ledger.commit(request)
        self._committed(request, groups)
        return number

    def _committed(self, request: CommitRequest, groups: Sequence[LeasedGroup]) -> None:
        before = self.lineage[self.head].batches if self.head != NO_VERSION else 0
        self.lineage[request.number] = VersionNode(self.head, before + request.batches)
        self.head, self.last_commit = request.number, request
        for group in groups:
            del self.leased[group.group]
            for member in group.members:
                slot = f"{group.group}.{member.attempt_id.sample}"
                assert slot not in self.trained, f"slot {slot} was consumed by {self.trained[slot]} already (P1)"
                self.trained[slot] = request.number

    async def commit_again(self, a: int, b: int, c: int) -> None:
        """The reply of the last commit was lost."""
        if self.last_commit is not None:
            await self.ledger.commit(self.last_commit)

    async def settle(self, a: int, b: int, c: int) -> None:
        """A checkpoint is made of the weights that the learner holds; then the head settles."""
        self.root.checkpoints.add(self.head)
        await self.ledger.settle(self.fence, self.head)

    async def rollback(self, a: int, b: int, c: int) -> object:
        """Resume before the head, from a version on its lineage or off it."""
        version = self._version(a)
        await self.ledger.rollback(self.fence, version)
        self.head = version
        self.leased.clear()
        self.trained = {slot: v for slot, v in self.trained.items() if is_ancestor(self.lineage, v, version)}
        return version

    # --- losses -------------------------------------------------------------------------------------------------------

    async def mark(self, a: int, b: int, c: int) -> None:
        """Remember the server's state for a later loss."""
        assert self.h.mark is not None, "the harness cannot take a copy of the server's state"
        if not (await self.ledger.stats()).suspect:
            self.marked = (await self.h.mark(), self.log.copy())

    async def rewind(self, a: int, b: int, c: int) -> object:
        """The server loses what it did since the mark. It is looked at now, or only later."""
        assert self.h.rewind is not None, "the harness cannot put the server back"
        if self.marked is None:
            return None
        token, log = self.marked
        await self.h.rewind(token)
        self.log = log.copy()
        return await self.recover(a, b, c) if c < 5 else None

    async def wipe(self, a: int, b: int, c: int) -> object:
        """The server loses everything; rarely."""
        assert self.h.wipe is not None, "the harness cannot empty the server"
        if a % 2:
            return None
        await self.h.wipe()
        self.marked, self.log = None, FateReader()
        return await self.recover(a, b, c) if c < 5 else None

    async def restart(self, a: int, b: int, c: int) -> object:
        """The server loses nothing, which somebody has to find out."""
        assert self.h.restart is not None, "the harness cannot restart the server"
        await self.h.restart()
        return await self.recover(a, b, c) if c < 5 else None

    async def recover(self, a: int, b: int, c: int) -> object:
        """What the driver does (P8): trust the ledger, or rebuild it from the run root and start another learner."""
        if await self.ledger.confirm(*self.root.newest()):
            return "confirmed"
        before = await self.ledger.stats()
        self.epoch += 1
        chain = self.root.chain(self.epoch, before.head)
        await self.ledger.reconcile(chain)
        if before.head is None:
            named = {
                str(self.h.attempt(group.group, member.sample, member.attempt)): member.fate
                for group in chain.consumed
                for member in group.members
            }
            self.log = FateReader(0, named, Counter(chain.fates) - Counter(named.values()))
        self.head, self.lineage = chain.head, self.root.lineage()
        self.trained = self.root.consumed_on_lineage()
        self.leased.clear()
        self.staged.clear()
        self.given.clear()
        self.highest_fence = (await self.ledger.stats()).fence
        if b < 4:
            await self.acquire(a, b, c)
        return chain

    # --- everybody ----------------------------------------------------------------------------------------------------

    async def advance(self, a: int, b: int, c: int) -> None:
        """Time passes."""
        await self.h.advance(_SECONDS[a % 3])

    async def stop(self, a: int, b: int, c: int) -> None:
        """Rarely: only a new learner's rollback ends it. What the player still holds is Fenced until then."""
        if a == b == c:
            await self.ledger.stop("enough")
            self.highest_fence += 1
            left = await self.ledger.stats()
            assert (left.fates[Fate.IN_FLIGHT], left.groups_leased) == (0, 0), f"in flight after a stop: {left}"

    async def checked(self) -> tuple[Sequence[FateRow], LedgerStats]:
        """The fates that changed and the counts, after every invariant was looked at."""
        stats = await self.h.stats()
        assert min(stats.fates.values()) >= 0, f"a fate has a negative count: {stats.fates}"
        assert stats.payload_bytes >= 0
        assert stats.groups_waiting <= stats.groups_open
        assert min([*stats.lags.values(), *stats.slot_seconds.values(), 0]) == 0, f"taken back too often: {stats}"
        assert sum(stats.lags.values()) <= stats.fates[Fate.TRAINED]
        if stats.suspect:
            return [], stats
        rows = await self._changed_fates()
        logged = Counter(self.log.ends.values()) + self.log.unlogged
        ended = Counter({fate: count for fate, count in stats.fates.items() if fate != Fate.IN_FLIGHT and count})
        assert logged == ended, f"the log of fates adds up to {logged}, the counts are {ended} (P3)"
        return rows, stats

    async def _changed_fates(self) -> Sequence[FateRow]:
        """The log since the last call, which goes to the run root."""
        changed: list[FateRow] = []
        while True:
            rows, position = await self.ledger.fates(self.log.position, _FATES_PER_READ)
            assert position == self.log.position + len(rows), f"{len(rows)} rows led to {position}, none may be missing"
            self.log.position = position
            if not rows:
                self.root.rows.extend(changed)
                return changed
            changed.extend(rows)
            self.log.take(rows)
