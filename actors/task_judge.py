"""Which tasks are out: what the episodes of a task, and its oracle, say about it.

::

    ENV_BUG ──────────────────────────────┐            BROKEN ──► quarantined
    ENV_TRANSIENT of the environment,     ├─► oracle ─ WORKS  ──► a fault of that episode, counted
    at the last attempt of its slot ──────┘  (once a   UNKNOWN ─► quarantined after MOST_BUGS episodes with ENV_BUG
                                              task)               and none without a fault

An episode into which a fault was put says nothing about its task; neither does a fault of the infrastructure. The
oracle plays beside the episodes, few at once, and nobody waits for it. What is counted is counted by each process: the
members of a group are played by one.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum, auto

from headrace.actors.oracle import Finding, OracleVerdict
from headrace.actors.quarantine import Quarantine, QuarantinedTask, TaskKey, task_key
from headrace.platform.records.episode import Episode
from headrace.platform.records.message import Task
from headrace.platform.records.status import FaultOwner, Status

MOST_BUGS = 3
"""Episodes of one task that may end ENV_BUG where no oracle can say whose fault it is."""
MOST_TASKS = 100_000
"""Tasks that are remembered; beyond it those heard of least recently are forgotten."""
_ORACLES = 2

Oracle = Callable[[str, Task, int], Awaitable[OracleVerdict]]
"""Environment as the recipe knows it, task and seed; raises nothing but its cancellation."""


class Doubt(Enum):
    """What an episode calls for."""

    NONE = auto()
    ASK = auto()
    OUT = auto()


@dataclass(slots=True)
class _Known:
    """Of one task."""

    bugs: int = 0
    valid: bool = False
    asked: bool = False
    finding: Finding | None = None


class Suspicions:
    """The decisions, without effects. `findings` counts what oracles found."""

    def __init__(self) -> None:
        self._known: OrderedDict[TaskKey, _Known] = OrderedDict()
        self.findings: Counter[str] = Counter()

    def note(self, episode: Episode, is_last: bool) -> Doubt:
        """What follows from an episode. `is_last`: its slot gets no further attempt."""
        known = self._of(task_key(episode.task.environment, episode.task))
        if not episode.status.is_error:
            known.valid |= episode.fault_owner is FaultOwner.NONE
            return Doubt.NONE
        if episode.injected_faults or episode.fault_owner is not FaultOwner.ENVIRONMENT:
            return Doubt.NONE
        is_bug = episode.status is Status.ENV_BUG
        if not (is_bug or is_last):
            return Doubt.NONE
        known.bugs += is_bug
        if not known.asked:
            known.asked = True
            return Doubt.ASK
        return Doubt.OUT if self._is_hopeless(known) else Doubt.NONE

    def heard(self, key: TaskKey, verdict: OracleVerdict) -> Doubt:
        """What follows from an oracle's verdict."""
        known = self._of(key)
        known.finding = verdict.finding
        self.findings[verdict.finding.value] += 1
        return Doubt.OUT if verdict.finding is Finding.BROKEN or self._is_hopeless(known) else Doubt.NONE

    def _of(self, key: TaskKey) -> _Known:
        known = self._known.setdefault(key, _Known())
        self._known.move_to_end(key)
        if len(self._known) > MOST_TASKS:
            self._known.popitem(last=False)
        return known

    @staticmethod
    def _is_hopeless(known: _Known) -> bool:
        return known.finding is Finding.UNKNOWN and known.bugs >= MOST_BUGS and not known.valid


class TaskJudge:
    """Puts tasks of this process's episodes into quarantine. Everything happens on one event loop.

    Args:
        quarantine: the process's; what is found here goes in at once.
        oracle: asked at most once for each task.
    """

    def __init__(self, quarantine: Quarantine, oracle: Oracle) -> None:
        self._quarantine = quarantine
        self._oracle = oracle
        self._suspicions = Suspicions()
        self._asking: set[asyncio.Task[None]] = set()
        self._places = asyncio.Semaphore(_ORACLES)
        self._found: list[QuarantinedTask] = []

    @property
    def findings(self) -> dict[str, int]:
        """How often oracles found that a task works, is broken, or cannot be told about."""
        return dict(self._suspicions.findings)

    def ended(self, episode: Episode, is_last: bool) -> None:
        """Take note of an episode, once the ledger has said whether its slot gets another attempt (`is_last`: not)."""
        doubt = self._suspicions.note(episode, is_last)
        if doubt is Doubt.OUT:
            self._put_out(episode, f"{MOST_BUGS} of its episodes ended {Status.ENV_BUG}; the last one: {episode.fault}")
        elif doubt is Doubt.ASK:
            asking = asyncio.create_task(self._ask(episode), name=f"oracle of {episode.task.task_id}")
            self._asking.add(asking)
            asking.add_done_callback(self._asking.discard)

    def found(self) -> list[QuarantinedTask]:
        """What was put into quarantine here, for the others to be told. All of it each time: telling twice does no
        harm, and nothing is lost with an answer that does not arrive."""
        return list(self._found)

    async def settle(self) -> None:
        """Wait for the oracles that are asked now."""
        while self._asking:
            await asyncio.wait(set(self._asking))

    async def close(self) -> None:
        """Ask no more; the sessions of oracles are closed."""
        for asking in self._asking:
            asking.cancel()
        await self.settle()

    async def _ask(self, episode: Episode) -> None:
        task = episode.task
        async with self._places:
            verdict = await self._oracle(task.environment, task, episode.seed)
        if self._suspicions.heard(task_key(task.environment, task), verdict) is Doubt.OUT:
            said = f"its demonstration fails: {verdict.cause}" if verdict.finding is Finding.BROKEN else verdict.cause
            self._put_out(episode, f"{said}; after {episode.status}: {episode.fault}")

    def _put_out(self, episode: Episode, reason: str) -> None:
        task = episode.task
        row = QuarantinedTask(
            environment=task.environment,
            task_id=task.task_id,
            task_version=task.version,
            split=task.split,
            environment_name=episode.environment,
            environment_version=episode.environment_version,
            reason=reason,
            episode_id=episode.episode_id,
        )
        self._found += self._quarantine.observe([row])
