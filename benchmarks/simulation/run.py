"""One simulated run: a heap of events on a virtual clock, around the ledger that the in-process runtime uses.

    slots ── admit ──► [ledger] ── lease (when the pacer lets it) ──► learner step ── commit ──► the head moves
      ▲  └── put ──────►  ▲                                                                          │
      └── renew: what is not worth going on with                turns move to the head (turn mode) ◄─┘

Real: every decision of the ledger (room, early closing, eviction, cancellation, restarts, lag) and of the pacer.
Simulated: how long an episode and a learner step take. A restart draws a new duration.

`MemoryLedger` never suspends, so its coroutines are driven by hand. Nothing reads a clock but this one: the same seed
gives the same run.
"""

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from math import ceil
from typing import Any, TypeVar

from headrace.platform.config.episode_queue import QueueConfig
from headrace.platform.ledger.memory import MemoryLedger
from headrace.platform.ledger.policy import NO_VERSION, VersionNode, path_lag
from headrace.platform.records.delivery import CommitRequest, LeasedGroup, LedgerLimits, Outcome, Submission
from headrace.platform.records.ids import AttemptId
from headrace.platform.records.status import CancelReason
from headrace.trainer.pacing import Pacer
from simulation.durations import Durations
from simulation.tally import Attempt, Tally

T = TypeVar("T")

RUN, HOLDER = "simulated", "worker"
POLL_S = 1.0
"""How soon a held learner asks again, and how soon workers learn that a lease or a commit has given a group up."""
RENEW_S = 5.0
"""How often workers renew their leases whatever happens."""
MAX_WAIT_S = 600.0
"""Longest wait before one step under plain waiting: all but one in 600 episodes end within it."""
_EVER_S = 1e9
_PAGE = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The machine and the tasks. A batch is `batch_groups` groups of `group_size`; times in seconds."""

    durations: Durations = field(default_factory=lambda: Durations(20.0, 300.0))
    slots: int = 336
    group_size: int = 8
    batch_groups: int = 32
    step_s: float = 30.0
    turns: int = 8

    @property
    def ideal(self) -> float:
        """Episodes per second when neither slots nor learner ever waste anything."""
        return min(self.slots / self.durations.mean_s, self.batch_groups * self.group_size / self.step_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """What happens at the lag limit, and whether an episode's turns move to the newest version (`turn`)."""

    name: str
    max_lag: int
    over_lag: str = "drop"
    early_missing: int = 0
    lag_restarts: int = 0
    turn: bool = False

    def limits(self, setting: Setting) -> LedgerLimits:
        """For the ledger. Workers and learner never die here, and no group has too many wrong answers to learn from."""
        return LedgerLimits(
            batch_groups=setting.batch_groups,
            max_lag=self.max_lag,
            min_group=setting.group_size - self.early_missing,
            group_deadline_s=_EVER_S,
            dispatch_lease_s=15.0,
            learner_lease_s=_EVER_S,
            drop_zero_variance=False,
            mask_over_lag=self.over_lag == "mask",
            early_missing=self.early_missing,
            lag_restarts=self.lag_restarts,
        )

    def queue(self) -> QueueConfig:
        """For the pacer."""
        return QueueConfig.model_validate(
            {
                "max_lag": self.max_lag,
                "over_lag": self.over_lag,
                "max_wait_s": MAX_WAIT_S,
                "early_missing": self.early_missing,
                "lag_restarts": self.lag_restarts,
            }
        )


def drive(call: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never suspends."""
    try:
        call.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    call.close()
    raise RuntimeError("the in-memory ledger suspended; the simulation has no loop for that")


class Simulation:
    """See the module. `run` once."""

    def __init__(self, setting: Setting, policy: Policy, seed: int) -> None:
        self.now_s = 0.0
        self._setting = setting
        self._policy = policy
        self._rng = random.Random(seed)
        self._ledger = MemoryLedger(RUN, policy.limits(setting), lambda: self.now_s)
        self._pacer = Pacer(policy.queue(), 0.0)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self._free = setting.slots
        self._waiting: deque[AttemptId] = deque()
        self._running: dict[int, set[AttemptId]] = {}  # by group; those waiting for a slot included
        self._pinned: dict[int, int] = {}
        self._attempts: dict[str, Attempt] = {}
        self._room = True
        self._training: tuple[LeasedGroup, ...] = ()
        self._lineage: dict[int, VersionNode] = {}
        self._head = NO_VERSION
        self._fence = 0
        self._fates_read = 0
        self._polling = False
        self._tally: Tally | None = None

    def run(self, steps: int, warm_up: int) -> Tally:
        """`warm_up` learner steps that do not count, then `steps` that do."""
        self._fence = drive(self._ledger.acquire_learner("learner"))
        self._commit({})
        self._pacer.begin_step()
        self._at(RENEW_S, self._beat)
        self._fill()
        tally = None
        while self._head < warm_up + steps:
            if tally is None and self._head == warm_up:
                tally = self._tally = Tally(self._setting.durations, self._policy.max_lag, self.now_s)
            self.now_s, _, action, arguments = heapq.heappop(self._events)
            action(*arguments)
        if tally is None or not drive(self._ledger.stats()).holds:
            raise RuntimeError("the ledger's equation does not hold (P3), or nothing was measured")
        tally.ended_s = self.now_s
        return tally

    def _at(self, after_s: float, action: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._events, (self.now_s + after_s, next(self._order), action, arguments))

    # --- workers ------------------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Give free slots to attempts; admit whole groups while there is room and a slot left (P19)."""
        size = self._setting.group_size
        while self._free:
            if self._waiting:
                self._start(self._waiting.popleft())
                continue
            if not self._room:
                return
            admission = drive(self._ledger.admit(self._head, size, ceil(self._free / size), HOLDER))
            self._room = bool(admission.tickets)
            for ticket in admission.tickets:
                ids = [AttemptId(RUN, ticket.group, sample, attempt) for sample, attempt in ticket.attempts]
                self._running[ticket.group] = set(ids)
                self._pinned[ticket.group] = ticket.version
                self._attempts.update((str(one), Attempt(self._setting.durations.draw(self._rng))) for one in ids)
                self._waiting.extend(ids)

    def _start(self, attempt_id: AttemptId) -> None:
        if attempt_id not in self._running.get(attempt_id.group, ()):
            return  # its group was given up before it had a slot
        attempt = self._attempts[str(attempt_id)]
        self._free -= 1
        attempt.started_s = self.now_s
        turns = self._setting.turns if self._policy.turn else 1
        if not self._policy.turn:
            attempt.turn_versions = (self._pinned[attempt_id.group],)
        for turn in range(turns if self._policy.turn else 0):
            self._at(attempt.duration_s * turn / turns, self._turn, attempt)
        self._at(attempt.duration_s, self._finish, attempt_id)

    def _turn(self, attempt: Attempt) -> None:
        """A turn begins, with the newest version."""
        attempt.turn_versions += (self._head,)

    def _finish(self, attempt_id: AttemptId) -> None:
        """An episode has ended, unless it was given up before."""
        if attempt_id not in self._running.get(attempt_id.group, ()):
            return
        attempt = self._attempts[str(attempt_id)]
        self._leave(attempt_id)
        submission = Submission(
            attempt_id=attempt_id,
            outcome=Outcome.DONE,
            payload_hash="h",
            store_file="f",
            oldest_version=min(attempt.turn_versions),
            newest_version=max(attempt.turn_versions),
        )
        drive(self._ledger.put([submission]))
        self._step()
        self._fill()

    def _beat(self) -> None:
        self._renew()
        self._at(RENEW_S, self._beat)

    def _renew(self) -> None:
        """Keep the workers' leases, and give up what the ledger has no use for."""
        for notice in drive(self._ledger.renew(HOLDER, list(self._running))):
            given_up = sorted(self._running.get(notice.group, ()))
            for attempt_id in given_up:
                self._leave(attempt_id)
            reason = notice.reason or CancelReason.STOPPED
            drive(
                self._ledger.put(
                    [Submission(attempt_id=one, outcome=Outcome.CANCELLED, reason=reason) for one in given_up]
                )
            )
            self._room = True
        self._step()
        self._fill()

    def _leave(self, attempt_id: AttemptId) -> None:
        """Free the slot, if the attempt had one."""
        members = self._running[attempt_id.group]
        members.discard(attempt_id)
        if not members:
            del self._running[attempt_id.group], self._pinned[attempt_id.group]
        attempt = self._attempts[str(attempt_id)]
        self._free += attempt.started_s is not None
        attempt.played_s = 0.0 if attempt.started_s is None else self.now_s - attempt.started_s
        self._settle(str(attempt_id))

    # --- the learner --------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """Begin a learner step if there is a batch and the pacer has nothing against it."""
        if self._training:
            return
        count = self._setting.batch_groups
        if self._pacer.asks and (self._policy.early_missing or drive(self._ledger.stats()).groups_ready >= count):
            risk = drive(self._ledger.at_risk(self._fence, self._head, 0, count))
            if not self._pacer.may_start(risk, self.now_s):
                self._poll()
                return
        self._training = tuple(drive(self._ledger.lease(self._fence, self._head, 0, count)))
        if not self._training:
            return
        for member in (member for group in self._training for member in group.members):
            self._train(self._attempts[str(member.attempt_id)])
        if self._tally is not None:
            self._tally.held_s += self._pacer.held_s
        self._room = True
        self._at(POLL_S, self._renew)
        self._at(self._setting.step_s, self._end_step)

    def _poll(self) -> None:
        """Ask again a little later, once however often the step was refused until then."""
        if not self._polling:
            self._polling = True
            self._at(POLL_S, self._polled)

    def _polled(self) -> None:
        self._polling = False
        self._step()
        self._fill()

    def _train(self, attempt: Attempt) -> None:
        """Mask what is over the limit when that is the policy (P15), and take down the lag of the rest (P14)."""
        limit, lags = self._policy.max_lag, []
        for version in attempt.turn_versions:
            within = path_lag(self._lineage, self._head, 0, version, limit) <= limit
            if within or self._policy.over_lag != "mask":
                lags.append(self._head - version)  # by count of commits: not the ledger's own reckoning
        attempt.live = len(lags) / len(attempt.turn_versions)
        if self._tally is not None:
            for lag in lags:
                self._tally.token_lag(lag)

    def _end_step(self) -> None:
        members = [member for group in self._training for member in group.members]
        self._training = ()
        self._commit({str(member.attempt_id): "trained" for member in members})
        self._pacer.begin_step()
        self._room = True
        self._at(POLL_S, self._renew)
        self._step()
        self._fill()

    def _commit(self, fates: dict[str, str]) -> None:
        """Publish the next version, settle it at once, and read what became of every attempt."""
        number = drive(self._ledger.stage(self._fence))
        batches = 0 if self._head == NO_VERSION else 1
        drive(
            self._ledger.commit(
                CommitRequest(
                    fence=self._fence,
                    number=number,
                    parent=self._head,
                    content_hash=f"v{number}",
                    batches=batches,
                    fates=fates,
                )
            )
        )
        before = self._lineage[self._head].batches if batches else 0
        self._lineage[number] = VersionNode(self._head, before + batches)
        self._head = number
        drive(self._ledger.settle(self._fence, number))
        self._read_fates()

    def _read_fates(self) -> None:
        while True:
            rows, self._fates_read = drive(self._ledger.fates(self._fates_read, _PAGE))
            if not rows:
                return
            for row in rows:
                if row.episode_id in self._attempts:
                    self._attempts[row.episode_id].fate = f"{row.fate}:{row.reason}".rstrip(":")
                    self._settle(row.episode_id)

    def _settle(self, episode_id: str) -> None:
        """Count an attempt whose fate is final and whose slot is free."""
        attempt = self._attempts[episode_id]
        if attempt.fate and attempt.played_s is not None:
            del self._attempts[episode_id]
            if self._tally is not None:
                self._tally.ended(attempt)
