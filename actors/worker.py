"""The rollout worker: plays groups for as long as the ledger has room for them.

    ledger ── admit ──► [admission loop] ── a task per attempt ──► play_episode ──► finished ──► [delivery loop] ──► put
                 ▲                                   ▲                                              │
                 └── room: freed by put, lease, drop └────────────── retry in the same slot ◄───────┘

- The admission loop first puts what an earlier process left in the outbox, then consumes ledger room and free places;
  it waits for whichever is missing. Places are freed by delivered attempts, room by the learner and by groups that
  leave at once (P20).
- Attempts wait for the engine and the world, each under a deadline.
- The delivery loop consumes what has ended; it never blocks on the ledger for room (P19). It ends by itself, after
  the last attempt: a batch that is on its way is not torn.
- The renewal loop keeps the dispatch leases and learns which groups are not worth going on with (P2).
- The watch loop waits for nobody: it gives up groups whose leases have lapsed (P12), and says what the worker does.
- The confirmation loop empties the outbox (P11).

While the ledger's server is away, every loop but the watch waits in its call, for as long as `PatientLedger` does;
episodes go on, and what has ended waits in its place (case Q14).

Works with or without Ray; `rollout_actor.py` is the shell around it.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

from headrace.actors.attempts import Attempts, Cancelled, Ended, OpenGroup
from headrace.actors.confirmation import Confirmation
from headrace.actors.delivery import MAX_DELIVERY, Delivery
from headrace.actors.dispatch_leases import DispatchLeases
from headrace.actors.evaluation_play import EvaluationPlay
from headrace.actors.harness.play import Doorway
from headrace.actors.news import News
from headrace.actors.outcomes import EnvironmentCounts, WorkerStats, total_counts
from headrace.actors.plan import AsyncScorer, PlayedEpisode
from headrace.actors.player import Place, Player
from headrace.actors.task_judge import TaskJudge
from headrace.actors.tasks.curriculum import TaskResult
from headrace.actors.worker_settings import WorkerSettings
from headrace.actors.worlds import Worlds
from headrace.platform.contracts import Renderer, TokenGenerator
from headrace.platform.errors import ConfigError
from headrace.platform.ledger.patient import PatientLedger
from headrace.platform.observability.parts import Part
from headrace.platform.records.delivery import GroupTicket, Refusal, Verdict
from headrace.platform.records.evaluation import EpisodeOutcome
from headrace.platform.records.ids import AttemptId
from headrace.platform.records.status import CancelReason

__all__ = ["RolloutWorker", "WorkerSettings"]

_log = logging.getLogger(__name__)
_RECENT = 64
_ADMISSION_GRACE_S = 5.0
_WAITS = {
    Refusal.NONE: "",
    Refusal.CAPACITY: "room in the queue (capacity)",
    Refusal.STALE_VERSION: "a version that is not stale",
    Refusal.NO_HEAD: "the first version",
    Refusal.STOPPED: "the end: the run is stopped",
}


class RolloutWorker:
    """Plays training groups in the background and evaluation episodes on request.

    `holder` is the name under which this process has dispatch leases (P2): nobody else ever had it.

    Args:
        newest_version: the newest version that the pool can serve, None while there is none.
        evaluation_worlds: makes the worlds of a split; asked once for each.
        scorers: by environment, as recipes know it, for those that have one.
        doorways: by environment, for those that harnesses play.
        part: where to say what the worker does.
        replace_replica: connects to a replica that was started anew; see `replace_replica`.

    Raises:
        ConfigError: when not even one group can be played at once.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        worlds: Worlds,
        renderer: Renderer,
        generator: TokenGenerator,
        newest_version: Callable[[], int | None],
        delivery: Delivery,
        evaluation_worlds: Callable[[str], Worlds],
        scorers: Mapping[str, AsyncScorer] | None = None,
        part: Part | None = None,
        replace_replica: Callable[[str, str, int], Awaitable[None]] | None = None,
        retries: Callable[[], tuple[int, int]] | None = None,
        doorways: Mapping[str, Doorway] | None = None,
    ) -> None:
        if settings.max_episodes < settings.group_size:
            raise ConfigError(
                f"rollout.max_episodes={settings.max_episodes} has no room for one group of"
                f" learner.algorithm.group_size={settings.group_size}"
            )
        self.holder = f"{settings.worker_id}/{secrets.token_hex(4)}"
        self._settings = settings
        self._worlds = worlds
        self._newest_version = newest_version
        self._delivery = delivery
        self._part = part
        self._replace_replica = replace_replica
        self._retries = retries
        self._player = Player(settings, renderer, generator, scorers or {}, doorways or {})
        self._evaluation = EvaluationPlay(settings, self._player, delivery, evaluation_worlds)
        self._attempts = Attempts(settings.run, self._play_attempt, self._on_end, settings.branching)
        self._leases = DispatchLeases(delivery.ledger, self.holder, self._attempts, settings.dispatch_lease_s)
        outbox = delivery.outbox
        self._confirmation = Confirmation(delivery.ledger, outbox) if outbox is not None else None
        self._finished: asyncio.Queue[Ended | None] = asyncio.Queue()  # None: nothing comes after it
        self._place_freed = asyncio.Event()
        self._loops: list[asyncio.Task[None]] = []
        self._stopping = False
        self._waiting_for = ""
        self._statuses: Counter[str] = Counter()
        self._faults: deque[str] = deque(maxlen=8)
        self._counts: dict[str, EnvironmentCounts] = {}
        self._results: list[TaskResult] = []
        self._judge = TaskJudge(worlds.quarantine, worlds.verdict_on)
        self._recent: deque[PlayedEpisode] = deque(maxlen=_RECENT)

    async def put_left(self) -> None:
        """Put what an earlier process of this worker had finished and not put (P11). `start` does it too."""
        if self._confirmation is not None:
            await self._confirmation.put_left()

    async def start(self) -> None:
        """Begin to play training groups."""
        self._stopping = False
        loops = [self._delivery_loop, self._admission_loop, self._renewal_loop, self._watch_loop]
        if self._confirmation is not None:
            loops.append(self._confirmation_loop)
        for loop in loops:
            self._loops.append(asyncio.create_task(loop(), name=loop.__name__.strip("_")))

    async def stop(self) -> None:
        """Admit nothing more, cancel what runs and tell the ledger, deliver what is finished.

        Raises:
            Exception: whatever had ended the delivery.
        """
        self._stopping = True
        self._place_freed.set()
        loops, self._loops = self._loops, []
        delivering, admitting, others = loops[:1], loops[1:2], loops[1:]
        if admitting:  # what the ledger is just giving out is taken, so that it can be given back (case X4)
            await asyncio.wait(admitting, timeout=_ADMISSION_GRACE_S)
        for loop in others:
            loop.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._attempts.stop(CancelReason.STOPPED)
        self._finished.put_nowait(None)
        await (delivering[0] if delivering else self._delivery_loop())
        await self._judge.close()
        self._waiting_for = ""
        self._tell("stopped")

    async def close(self) -> None:
        """End the scorers' processes, close every box and every connection to a host."""
        await self._player.close()
        await self._worlds.resources.close()

    def stats(self) -> WorkerStats:
        """Counts since the start, and the last faults.

        Raises:
            Exception: whatever ended one of the worker's loops, or an attempt outside of its episode.
        """
        if self._attempts.broken is not None:
            raise self._attempts.broken
        for loop in self._loops:
            if loop.done() and not loop.cancelled() and (error := loop.exception()):
                raise error
        retried, resampled = self._retries() if self._retries is not None else (0, 0)
        return WorkerStats(
            worker_id=self._settings.worker_id,
            running=self._attempts.running,
            statuses=dict(self._statuses),
            faults=tuple(self._faults),
            environments=total_counts([self._counts]),
            durability=self._confirmation.durability if self._confirmation is not None else "",
            quarantined=tuple(self._judge.found()),
            retried=retried,
            resampled=resampled,
        )

    def news(self) -> News:
        """What was scored here since the last call, where the recipe's curriculum wants it."""
        results, self._results = self._results, []
        return News(scores=tuple(results))

    def tell(self, news: News) -> None:
        """Take note of what this and other workers have found out. Groups that are open keep their task."""
        self._worlds.quarantine.observe(news.quarantined)
        if self._worlds.curriculum is not None:
            self._worlds.curriculum.observe(news.scores)

    def recent(self, n: int) -> list[PlayedEpisode]:
        """The last training episodes, at most `n`, the newest first."""
        return list(self._recent)[: -n - 1 : -1]

    def tool_intervals(self, since_s: float) -> list[tuple[float, float]]:
        """When tools ran, as (start, end) in seconds since the epoch, for calls that ended after `since_s`."""
        return self._player.tool_intervals(since_s)

    async def replace_replica(self, old_name: str, host: str, port: int) -> None:
        """Ask the replica at this address from now on, and no longer the one called `old_name`.

        Raises:
            ConfigError: the worker's engine is no pool of replicas.
            EngineDead, DeadlineExceeded: nobody answers there.
        """
        if self._replace_replica is None:
            raise ConfigError("this worker plays with an engine of its own, which is no pool of replicas")
        await self._replace_replica(old_name, host, port)

    async def evaluate(
        self, version: int, split: str, positions: Sequence[int], index: int, samples: int = 1
    ) -> list[EpisodeOutcome]:
        """Play the tasks at `positions` of `split`, `samples` times each, with `version`; position by position.

        The s-th episode of a task is sample `index * samples + s` of its position; `EvaluationStore.claim` gives
        indices whose numbers do not meet. The episodes of a task share its world seed and differ in what they sample,
        which `index` has no part in. Positions that would repeat a task are left out. Training episodes take no place
        from an evaluation, nor it from them.
        """
        return await self._evaluation.evaluate(version, split, positions, index, samples)

    async def play_round(self, groups: int) -> int:
        """Admit up to `groups` groups, play them and deliver them in order; returns how many were admitted.

        The lock-step form of the loops below, for the in-process runtime.
        """
        version = self._newest_version()
        if version is None:
            return 0
        await self.put_left()
        asked_s = time.monotonic()
        admission = await self._delivery.ledger.admit(version, self._settings.group_size, groups, self.holder)
        waiting = [attempt_id for ticket in admission.tickets for attempt_id in self._open(ticket, asked_s)]
        async with self._renewing():
            while waiting:  # who branches off a trunk begins when nothing of it is left to try
                now = [each for each in waiting if not self._attempts.must_wait(each)]
                later = [each for each in waiting if self._attempts.must_wait(each)]
                waiting = await self._deliver(await asyncio.gather(*map(self._play_present, now))) + later
        if self._confirmation is not None:
            await self._confirmation.round()
        return len(admission.tickets)

    # --- loops --------------------------------------------------------------------------------------------------------

    async def _admission_loop(self) -> None:
        await self.put_left()
        size = self._settings.group_size
        while not self._stopping:
            self._place_freed.clear()
            free = self._settings.max_episodes - self._attempts.places
            version = self._newest_version()
            if free < size or version is None:
                self._waiting_for = "a version" if version is None else ""
                await _wait(self._place_freed, self._settings.idle_s)
                continue
            asked_s = time.monotonic()
            admission = await self._delivery.ledger.admit(version, size, free // size, self.holder)
            for ticket in admission.tickets:
                self._begin(ticket, self._open(ticket, asked_s))
            self._waiting_for = "" if admission.tickets else _WAITS[admission.refusal]
            if not admission.tickets:
                await _wait(self._place_freed, self._settings.idle_s)

    async def _delivery_loop(self) -> None:
        while await self._deliver_next():
            pass

    async def _renewal_loop(self) -> None:
        while True:
            await asyncio.sleep(self._settings.renewal_s)
            await self._leases.renew()

    async def _watch_loop(self) -> None:
        while True:
            left_s = self._leases.lapse()
            away = isinstance(self._delivery.ledger, PatientLedger) and self._delivery.ledger.is_away
            self._tell(f"playing {self._attempts.running} episodes", "the ledger's server" if away else "")
            await asyncio.sleep(min(left_s, self._settings.renewal_s))

    async def _confirmation_loop(self) -> None:
        assert self._confirmation is not None
        while True:
            await asyncio.sleep(self._settings.confirm_every_s)
            await self._confirmation.round()

    @contextlib.asynccontextmanager
    async def _renewing(self) -> AsyncIterator[None]:
        """Keep the leases while the block runs."""
        renewing = asyncio.create_task(self._renewal_loop(), name="renewal_loop")
        try:
            yield
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)

    def _tell(self, state: str, waiting_for: str = "") -> None:
        if self._part is not None:
            self._part.set(state, waiting_for or self._waiting_for)
            if hosts := self._worlds.resources.hosts():
                self._part.note(hosts=hosts)

    # --- attempts -----------------------------------------------------------------------------------------------------

    def _open(self, ticket: GroupTicket, asked_s: float) -> list[AttemptId]:
        """Tasks go by position: a restarted group has that of the one which it restarts, but its own number (P16)."""
        return self._attempts.open(ticket, Place(self._worlds, ticket.position), asked_s)

    def _begin(self, ticket: GroupTicket, attempts: Sequence[AttemptId]) -> None:
        """Play the slots of a group. The rest of one whose worker is gone is not played where its task may be another
        by now than the one that the members before were given (P1)."""
        if len(attempts) < ticket.size and self._worlds.may_differ(ticket.position):
            for attempt_id in attempts:
                self._on_end(Cancelled(attempt_id, CancelReason.SUPERSEDED))
            return
        for attempt_id in attempts:
            self._attempts.spawn(attempt_id)

    async def _play_attempt(self, attempt_id: AttemptId, group: OpenGroup) -> PlayedEpisode:
        ticket = group.ticket
        # The version that the group is pinned to, not the newest (P18). One that the pool has no more fails (P23).
        prefix = await group.branches.prefix_of(attempt_id.sample)
        played = await self._player.play(attempt_id, group.place, ticket.version, ticket.dispatched_s, prefix=prefix)
        group.branches.ended(played)
        self._count(played)
        return played

    async def _play_present(self, attempt_id: AttemptId) -> PlayedEpisode:
        return await self._play_attempt(attempt_id, self._attempts.group_of(attempt_id))

    def _on_end(self, ended: Ended) -> None:
        self._finished.put_nowait(ended)

    def _count(self, played: PlayedEpisode) -> None:
        episode, environment = played.episode, played.episode.task.environment
        self._statuses[episode.status] += 1
        if played.score is None:
            self._faults.append(f"{episode.attempt_id}: {played.cause}")
        self._counts.setdefault(environment, EnvironmentCounts()).add(played)
        self._recent.append(played)
        curriculum = self._worlds.curriculum
        if curriculum is not None and played.score is not None:
            group = episode.dispatch_sequence
            self._results.append(TaskResult(environment, curriculum.key(episode.task), played.score, group))

    # --- delivery -----------------------------------------------------------------------------------------------------

    async def _deliver_next(self) -> bool:
        """Deliver what has ended, at least one attempt; False when nothing comes after it."""
        batch = [await self._finished.get()]
        batch += [self._finished.get_nowait() for _ in range(min(MAX_DELIVERY - 1, self._finished.qsize()))]
        ended = [each for each in batch if each is not None]
        again = await self._deliver(ended) if ended else []
        if again and self._stopping:
            await self._deliver([Cancelled(attempt_id, CancelReason.STOPPED) for attempt_id in again])
        elif again:
            for attempt_id in again:
                self._attempts.spawn(attempt_id)
        return len(ended) == len(batch)

    async def _deliver(self, ended: Sequence[Ended]) -> list[AttemptId]:
        """Store and put; returns the attempts to play next in slots that get another try."""
        played = [each for each in ended if isinstance(each, PlayedEpisode)]
        cancelled = [each for each in ended if isinstance(each, Cancelled)]
        again: list[AttemptId] = []
        episodes = {each.episode.attempt_id: each.episode for each in played}
        for attempt_id, reply in await self._delivery.deliver(played, cancelled):
            if attempt_id in episodes and not reply.verdict.is_refusal:
                self._judge.ended(episodes[attempt_id], is_last=reply.verdict is not Verdict.RETRY)
            if reply.verdict is Verdict.RETRY:
                follower = self._attempts.follow(attempt_id, reply.next_attempt)
                again += [follower] if follower is not None else []
                continue
            if reply.verdict.is_refusal:
                _log.info("put of %s was refused: %s", attempt_id, reply.verdict)
            self._attempts.over(attempt_id)
        self._place_freed.set()
        return again


async def _wait(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event, but not longer than `seconds`. (`asyncio.wait_for` of Python 3.11 can lose a cancellation.)"""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
