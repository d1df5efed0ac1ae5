"""The rollout worker: plays groups for as long as the ledger has room for them.

    ledger ── admit ──► [admission loop] ── a task per attempt ──► play_episode ──► finished ──► [delivery loop] ──► put
                 ▲                                   ▲                                              │
                 └── room: freed by put, lease, drop └────────────── retry in the same slot ◄───────┘

- The admission loop consumes ledger room and free places; it waits for whichever is missing. Places are freed by
  finished attempts, room by the learner and by groups that leave at once (P20).
- Attempts wait for the engine and the world, each under a deadline.
- The delivery loop consumes finished episodes; it never blocks on the ledger for room (P19). It ends by itself, after
  the last episode: a batch that is on its way is not torn.
- The cancellation loop asks which running groups are not worth going on with.

Works with or without Ray; `rollout_actor.py` is the shell around it.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from headrace.actors.delivery import Delivery
from headrace.actors.episode import play_episode
from headrace.actors.outcomes import EnvironmentCounts, WorkerStats, outcome_of, total_counts
from headrace.actors.plan import AsyncScorer, EpisodePlan, PlayedEpisode
from headrace.actors.sampling import sampling_params
from headrace.actors.tasks.curriculum import TaskResult
from headrace.actors.worlds import Setting, Worlds
from headrace.platform.contracts import Renderer, TokenGenerator
from headrace.platform.errors import ConfigError
from headrace.platform.records.delivery import GroupTicket, Outcome, Submission, Verdict
from headrace.platform.records.episode import Digests
from headrace.platform.records.evaluation import EpisodeOutcome
from headrace.platform.records.ids import AttemptId
from headrace.platform.records.status import CancelReason, Purpose
from headrace.platform.records.versions import VersionRef

_log = logging.getLogger(__name__)
_MAX_DELIVERY = 512
_RECENT = 64


@dataclass(kw_only=True, slots=True)
class WorkerSettings:
    """What a worker needs to know besides its parts."""

    run: str
    worker_id: str
    policy_id: str
    group_size: int
    max_episodes: int
    request_deadline_s: float
    digests: Digests = field(default_factory=Digests)
    idle_s: float = 0.01
    cancel_every_s: float = 1.0


@dataclass(slots=True)
class _Place:
    """What is played at one position, made when it is first asked for: everyone who plays there plays the same."""

    worlds: Worlds
    position: int
    setting: Setting | None = None


@dataclass(slots=True)
class _OpenGroup:
    ticket: GroupTicket
    slots_left: int
    place: _Place


class RolloutWorker:
    """Plays training groups in the background and evaluation episodes on request.

    Args:
        newest_version: the newest version that the pool can serve, None while there is none.
        evaluation_worlds: makes the worlds of a split; asked once for each.
        scorers: by environment, as recipes know it, for those that have one.

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
    ) -> None:
        if settings.max_episodes < settings.group_size:
            raise ConfigError(
                f"rollout.max_episodes={settings.max_episodes} has no room for one group of"
                f" learner.algorithm.group_size={settings.group_size}"
            )
        self._settings = settings
        self._worlds = worlds
        self._renderer = renderer
        self._generator = generator
        self._newest_version = newest_version
        self._delivery = delivery
        self._evaluation_worlds = evaluation_worlds
        self._scorers = dict(scorers or {})
        self._attempts: dict[AttemptId, asyncio.Task[None]] = {}
        self._groups: dict[int, _OpenGroup] = {}
        self._finished: asyncio.Queue[PlayedEpisode | None] = asyncio.Queue()  # None: nothing comes after it
        self._place_freed = asyncio.Event()
        self._loops: list[asyncio.Task[None]] = []
        self._stopping = False
        self._broken: BaseException | None = None
        self._statuses: Counter[str] = Counter()
        self._faults: deque[str] = deque(maxlen=8)
        self._tool_busy: deque[tuple[float, float]] = deque(maxlen=65536)
        self._counts: dict[str, EnvironmentCounts] = {}
        self._results: list[TaskResult] = []
        self._recent: deque[PlayedEpisode] = deque(maxlen=_RECENT)
        self._worlds_of_split: dict[str, Worlds] = {}
        self._making = asyncio.Lock()

    async def start(self) -> None:
        """Begin to play training groups."""
        self._stopping = False
        for loop in (self._delivery_loop, self._admission_loop, self._cancellation_loop):
            self._loops.append(asyncio.create_task(loop(), name=loop.__name__.strip("_")))

    async def stop(self) -> None:
        """Admit nothing more, cancel what runs and tell the ledger, deliver what is finished."""
        self._stopping = True
        loops, self._loops = self._loops, []
        for loop in loops[1:]:
            loop.cancel()
        await asyncio.gather(*loops[1:], return_exceptions=True)
        await self._cancel(list(self._attempts), CancelReason.STOPPED)
        self._finished.put_nowait(None)
        await asyncio.gather(*loops[:1], return_exceptions=True)
        while not self._finished.empty():
            await self._deliver_next()

    async def close(self) -> None:
        """End the scorers' processes."""
        for scorer in self._scorers.values():
            await scorer.close()

    def stats(self) -> WorkerStats:
        """Counts since the start, and the last faults.

        Raises:
            Exception: whatever ended one of the worker's loops, or an attempt outside of its episode.
        """
        if self._broken is not None:
            raise self._broken
        for loop in self._loops:
            if loop.done() and not loop.cancelled() and (error := loop.exception()):
                raise error
        return WorkerStats(
            worker_id=self._settings.worker_id,
            running=len(self._attempts),
            statuses=dict(self._statuses),
            faults=tuple(self._faults),
            environments=total_counts([self._counts]),
        )

    def task_results(self) -> list[TaskResult]:
        """What training episodes scored since the last call; nothing unless the recipe's curriculum wants it."""
        results, self._results = self._results, []
        return results

    def observe(self, results: Sequence[TaskResult]) -> None:
        """Tell the curriculum what this and other workers' episodes scored. Groups that are open keep their task."""
        if self._worlds.curriculum is not None:
            self._worlds.curriculum.observe(results)

    def recent(self, n: int) -> list[PlayedEpisode]:
        """The last training episodes, at most `n`, the newest first."""
        return list(self._recent)[: -n - 1 : -1]

    def tool_intervals(self, since_s: float) -> list[tuple[float, float]]:
        """When tools ran, as (start, end) in seconds since the epoch, for calls that ended after `since_s`."""
        return [interval for interval in self._tool_busy if interval[1] >= since_s]

    async def evaluate(
        self, version: int, split: str, positions: Sequence[int], index: int, samples: int = 1
    ) -> list[EpisodeOutcome]:
        """Play the tasks at `positions` of `split`, `samples` times each, with `version`; position by position.

        The s-th episode of a task is sample `index * samples + s` of its position; `EvaluationStore.claim` gives
        indices whose numbers do not meet. The episodes of a task share its world seed and differ in what they sample,
        which `index` has no part in. Positions that would repeat a task are left out. Training episodes take no place
        from an evaluation, nor it from them.
        """
        if split not in self._worlds_of_split:
            self._worlds_of_split[split] = await asyncio.to_thread(self._evaluation_worlds, split)
        worlds = self._worlds_of_split[split]
        free = asyncio.Semaphore(self._settings.max_episodes)

        async def one(place: _Place, sample: int) -> PlayedEpisode:
            async with free:
                number = index * samples + sample
                attempt_id = AttemptId(self._settings.run, place.position, number, 0, Purpose.EVAL)
                return await self._play(attempt_id, place, version, time.time(), sample)

        places = [_Place(worlds, position) for position in worlds.distinct(positions)]
        played = await asyncio.gather(*(one(place, sample) for place in places for sample in range(samples)))
        for start in range(0, len(played), _MAX_DELIVERY):
            await self._delivery.deliver(played[start : start + _MAX_DELIVERY])
        return [outcome_of(each, number % samples) for number, each in enumerate(played)]

    async def play_round(self, groups: int) -> int:
        """Admit up to `groups` groups, play them and deliver them in order; returns how many were admitted.

        The lock-step form of the loops below, for the in-process runtime.
        """
        version = self._newest_version()
        if version is None:
            return 0
        admission = await self._delivery.ledger.admit(version, self._settings.group_size, groups)
        waiting = [attempt_id for ticket in admission.tickets for attempt_id in self._open(ticket)]
        while waiting:
            played = await asyncio.gather(*(self._play_attempt(attempt_id) for attempt_id in waiting))
            waiting = await self._deliver(played)
        return len(admission.tickets)

    # --- loops --------------------------------------------------------------------------------------------------------

    async def _admission_loop(self) -> None:
        size = self._settings.group_size
        while True:
            self._place_freed.clear()
            free = self._settings.max_episodes - len(self._attempts)
            version = self._newest_version()
            if free < size or version is None:
                await _wait(self._place_freed, self._settings.idle_s)
                continue
            admission = await self._delivery.ledger.admit(version, size, free // size)
            for ticket in admission.tickets:
                for attempt_id in self._open(ticket):
                    self._spawn(attempt_id)
            if not admission.tickets:
                await _wait(self._place_freed, self._settings.idle_s)

    async def _delivery_loop(self) -> None:
        while await self._deliver_next():
            pass

    async def _cancellation_loop(self) -> None:
        while True:
            await asyncio.sleep(self._settings.cancel_every_s)
            for notice in await self._delivery.ledger.cancelled(list(self._groups)):
                attempts = [attempt_id for attempt_id in self._attempts if attempt_id.group == notice.group]
                if attempts:
                    _log.info("group %d is abandoned: %s", notice.group, notice.reason)
                    await self._cancel(attempts, notice.reason)

    # --- attempts -----------------------------------------------------------------------------------------------------

    def _open(self, ticket: GroupTicket) -> list[AttemptId]:
        self._groups[ticket.group] = _OpenGroup(ticket, ticket.size, _Place(self._worlds, ticket.group))
        return [AttemptId(self._settings.run, ticket.group, sample) for sample in range(ticket.size)]

    def _spawn(self, attempt_id: AttemptId) -> None:
        task = asyncio.create_task(self._attempt(attempt_id), name=str(attempt_id))
        self._attempts[attempt_id] = task
        task.add_done_callback(lambda task: self._attempt_over(attempt_id, task))

    def _attempt_over(self, attempt_id: AttemptId, task: asyncio.Task[None]) -> None:
        self._attempts.pop(attempt_id, None)
        self._place_freed.set()
        if not task.cancelled() and (error := task.exception()):
            self._broken = error

    async def _attempt(self, attempt_id: AttemptId) -> None:
        self._finished.put_nowait(await self._play_attempt(attempt_id))

    async def _play_attempt(self, attempt_id: AttemptId) -> PlayedEpisode:
        group = self._groups[attempt_id.group]
        played = await self._play(attempt_id, group.place, group.ticket.version, group.ticket.dispatched_s)
        self._count(played)
        return played

    async def _setting_at(self, place: _Place) -> Setting:
        """Made in the order of asking; a user's code may take its time, so it does that in a thread."""
        if place.setting is None:
            async with self._making:
                if place.setting is None and place.worlds.may_block(place.position):
                    place.setting = await asyncio.to_thread(place.worlds.made_setting, place.position)
                elif place.setting is None:
                    place.setting = place.worlds.made_setting(place.position)
        return place.setting

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

    async def _play(
        self, attempt_id: AttemptId, place: _Place, version: int, dispatched_s: float, sample: int | None = None
    ) -> PlayedEpisode:
        setting = await self._setting_at(place)
        config, settings = setting.config, self._settings
        plan = EpisodePlan(
            attempt_id=attempt_id,
            task=setting.task,
            seed=setting.seed,
            sample=sample,
            version=VersionRef(settings.policy_id, version),
            sampling=sampling_params(config, self._renderer),
            budgets=config.budgets.budgets(),
            digests=settings.digests,
            reset_deadline_s=config.reset_deadline_s,
            step_deadline_s=config.step_deadline_s,
            request_deadline_s=settings.request_deadline_s,
            dispatched_s=dispatched_s,
            worker_id=settings.worker_id,
        )
        environment = place.worlds.session(setting)
        began = time.time()
        played = await play_episode(
            plan, environment, self._renderer, self._generator, self._scorers.get(config.known_as)
        )
        for turn in played.episode.turns:
            if turn.tool_calls:
                self._tool_busy.append((began + turn.tool_calls[0].start_s, began + turn.tool_calls[-1].end_s))
        return played

    async def _cancel(self, attempts: Sequence[AttemptId], reason: CancelReason) -> None:
        tasks = {attempt_id: self._attempts[attempt_id] for attempt_id in attempts if attempt_id in self._attempts}
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        await self._give_up([attempt_id for attempt_id, task in tasks.items() if task.cancelled()], reason)

    async def _give_up(self, attempts: Sequence[AttemptId], reason: CancelReason) -> None:
        """Tell the ledger that these attempts are not played to their end."""
        if attempts:
            await self._delivery.ledger.put(
                [Submission(attempt_id=each, outcome=Outcome.CANCELLED, reason=reason) for each in attempts]
            )
        for attempt_id in attempts:
            self._slot_over(attempt_id)

    # --- delivery -----------------------------------------------------------------------------------------------------

    async def _deliver_next(self) -> bool:
        """Deliver what is finished, at least one episode; False when nothing comes after it."""
        batch = [await self._finished.get()]
        batch += [self._finished.get_nowait() for _ in range(min(_MAX_DELIVERY - 1, self._finished.qsize()))]
        played = [each for each in batch if each is not None]
        again = await self._deliver(played) if played else []
        if self._stopping:
            await self._give_up(again, CancelReason.STOPPED)
        else:
            for attempt_id in again:
                self._spawn(attempt_id)
        return len(played) == len(batch)

    async def _deliver(self, played: Sequence[PlayedEpisode]) -> list[AttemptId]:
        """Store and put; returns the attempts to play next in slots that get another try."""
        again: list[AttemptId] = []
        for attempt_id, reply in await self._delivery.deliver(played):
            if reply.verdict is Verdict.RETRY:
                again.append(AttemptId(attempt_id.run, attempt_id.group, attempt_id.sample, reply.next_attempt))
                continue
            if reply.verdict.is_refusal:
                _log.info("put of %s was refused: %s", attempt_id, reply.verdict)
            self._slot_over(attempt_id)
        return again

    def _slot_over(self, attempt_id: AttemptId) -> None:
        """The slot plays no more; with its last slot a group is forgotten."""
        group = self._groups.get(attempt_id.group)
        if group is not None:
            group.slots_left -= 1
            if group.slots_left == 0:
                del self._groups[attempt_id.group]


async def _wait(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event, but not longer than `seconds`. (`asyncio.wait_for` of Python 3.11 can lose a cancellation.)"""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
