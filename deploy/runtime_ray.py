"""The parts as Ray actors: engine replicas, rollout workers, the learner.

    driver (this) ── control calls ──► replica-R   rollout-W   learner
          │                                ▲  token door │ put     │ lease, commit
          │ watches                        └─────────────┘         ▼
          └──────────────────────────────────────► embedded Valkey, or the recipe's server

The driver starts what is missing (a local Ray, an embedded server), hands each actor a builder from wiring.py
(ray_launches.py), and starts again what dies: a part is found dead by any call, at the latest by the watch. Calls to it
are repeated where that is safe; what a dead part alone knew (scores, recent episodes) is lost. It ends only what it
started.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from headrace.actors.confirmation import BEST_EFFORT
from headrace.actors.news import News
from headrace.actors.outcomes import WorkerStats, total_counts
from headrace.actors.plan import PlayedEpisode
from headrace.deploy import wiring
from headrace.deploy.checks import check_cluster
from headrace.deploy.connections import connect_ledger, connect_registry
from headrace.deploy.context import RunContext
from headrace.deploy.ledger_watch import LedgerWatch
from headrace.deploy.placement import Placement
from headrace.deploy.pool_control import PoolControl
from headrace.deploy.pool_rolling import PoolRolling, longest_episode_s
from headrace.deploy.pool_scaling import PoolScaling
from headrace.deploy.ray_cluster import RayCluster
from headrace.deploy.ray_launches import Launches
from headrace.deploy.ray_parts import CONTROL_DEADLINE_S, RayPart
from headrace.deploy.runtime import Activity, Begun
from headrace.deploy.supervision import Supervision
from headrace.platform.errors import (
    DeadlineExceeded,
    Fenced,
    HeadraceError,
    LedgerAway,
    LedgerError,
    PartDied,
    RunFailed,
)
from headrace.platform.ledger.patient import PatientLedger
from headrace.platform.ledger.server import EmbeddedServer
from headrace.platform.records.delivery import LedgerStats
from headrace.platform.records.evaluation import EpisodeOutcome
from headrace.platform.records.tables import FateRow
from headrace.platform.store.events import Events
from headrace.serving.service import ReplicaStats
from headrace.trainer.report import StepReport

T = TypeVar("T")
S = TypeVar("S", ReplicaStats, WorkerStats)
_log = logging.getLogger(__name__)
_BEST_EFFORT = (
    "durability: best-effort (P11): the queue's server cannot say what is on its disk; use Valkey, Redis 7.2 or later,"
    " or appendfsync always"
)
_STOP_DEADLINE_S = 20.0
_POLL_S = 0.02
_CHECK_EVERY_S = 0.5
_FATE_ROWS = 10_000


class RayRuntime:
    """See the module."""

    def __init__(self, context: RunContext) -> None:
        check_cluster(context.config)
        self._context = replace(context, door_token=secrets.token_hex(32))
        self._events = Events(context.root, time.time)
        self._supervision = Supervision(context.config.runtime.max_restarts, self._events.add)
        self._cluster = RayCluster(context)
        self._placement = Placement(context.config, context.config.serving.start_deadline_s, context.run)
        self._ray_start: asyncio.Task[None] | None = None
        self._server: EmbeddedServer | None = None
        self._ledger: PatientLedger | None = None
        self._closings: list[Callable[[], Awaitable[None]]] = []
        self._ledger_watch: asyncio.Task[None] | None = None
        self._cluster_watch: asyncio.Task[None] | None = None
        self._pool_loops: list[asyncio.Task[None]] = []
        self._parts = Launches(self._supervision)
        self._seen: dict[tuple[str, int], ReplicaStats | WorkerStats] = {}
        self._fates_read, self._fates_epoch = 0, 0
        self._server_warnings: tuple[str, ...] = ()

    async def prepare(self) -> None:
        """See `Runtime.prepare`."""
        self._ray_start = asyncio.create_task(asyncio.to_thread(self._cluster.start))
        url = self._context.config.queue.redis_url
        if not url:
            self._server = EmbeddedServer(self._context.local("queue"))
            url = await asyncio.to_thread(self._server.start)
        self._context = replace(self._context, ledger_url=url)
        await self._open_ledger()
        await asyncio.shield(self._ray_start)
        self._cluster_watch = asyncio.create_task(self._watch_cluster())
        await self._placement.reserve()
        await self._parts.launch(
            self._context, self._connected(), self._placement, owns_server=self._server is not None
        )
        config, parts = self._context.config, self._parts
        control = PoolControl(self._context.root)
        loops = (PoolRolling(parts, config), PoolScaling(parts, config, control, self._events.add, self._see))
        self._pool_loops = [asyncio.create_task(loop.run(), name=type(loop).__name__) for loop in loops]

    async def begin(self, model_dir: Path) -> Begun:
        """See `Runtime.begin`."""
        return await self._parts.begin(model_dir)

    async def start_rollouts(self) -> None:
        """See `Runtime.start_rollouts`."""
        self._parts.rollouts_on = True
        await self._of_all("starting rollouts", self._parts.workers, lambda actor: actor.start.remote())

    async def stop_rollouts(self) -> None:
        """See `Runtime.stop_rollouts`."""
        self._parts.rollouts_on = False
        stopping = asyncio.gather(*(self._stop_worker(worker) for worker in self._parts.workers))
        try:
            await self._reachable(stopping)
        finally:  # whatever became of the workers; nobody is the learner afterwards
            self._parts.stopped = True
            if self._ledger is not None:
                await self._reachable(self._ledger.stop("the run is over"))

    async def step(self) -> StepReport:
        """See `Runtime.step`."""
        learner = self._parts.learner
        config = self._context.config
        deadline_s = 2 * max(config.learner.longest_wait_s, config.serving.longest_start_s) + CONTROL_DEADLINE_S
        asked = 0

        def step_of(actor: Any) -> Awaitable[StepReport]:
            nonlocal asked
            asked = learner.launch
            step: Awaitable[StepReport] = actor.step.remote()
            return step

        while True:
            try:
                report = await learner.ask("the learner step", step_of, deadline_s)
            except Fenced as error:
                await self._parts.check_rebuilt(error)
                await learner.replace(asked)
            except LedgerError as error:
                # P7: a refused commit, or leases that ran out. The run is still this learner's, but a learner is done
                # after any error, as if it were dead: the next one begins at the checkpoint (P6).
                await learner.restart(asked, str(error))
            else:
                self._supervision.reached(report.step)
                return report

    async def evaluate(self, version: int, split: str, tasks: int, samples: int, index: int) -> list[EpisodeOutcome]:
        """See `Runtime.evaluate`."""
        workers = self._parts.workers
        replicas = await self._wait_loaded(version)
        launches = [replica.launch for replica in replicas]

        def share(start: int) -> Callable[[Any], Awaitable[list[EpisodeOutcome]]]:
            positions = list(range(start, tasks, len(workers)))
            return lambda actor: actor.evaluate.remote(version, split, positions, index, samples)

        deadline_s = self._longest_evaluation_s(tasks * samples)
        played = await asyncio.gather(
            *(worker.ask("evaluating", share(n), deadline_s, "restart") for n, worker in enumerate(workers))
        )
        await self._of_all("asking", replicas, lambda actor: actor.stats.remote())
        if launches != [replica.launch for replica in replicas]:
            raise PartDied(f"a replica died while version {version} was evaluated")
        return [outcome for part in played for outcome in part]

    async def hold(self, version: int) -> None:
        """See `Runtime.hold`."""
        self._parts.held.add(version)
        if self._parts.holds_one:  # P22: one replica is chosen, and rolls to it (pool_rolling.py)
            return
        await self._of_all("holding a version", self._parts.replicas, lambda actor: actor.hold.remote(version))

    async def let_go(self, version: int) -> None:
        """See `Runtime.let_go`."""
        self._parts.held.discard(version)
        await self._of_all("letting a version go", self._parts.replicas, lambda actor: actor.let_go.remote(version))

    async def keep(self, versions: Sequence[int]) -> None:
        """See `Runtime.keep`."""
        self._parts.kept = list(versions)
        if not self._parts.stopped:  # afterwards nobody removes versions, and a learner that died stays dead
            await self._parts.learner.ask("keeping versions", lambda actor: actor.keep.remote(list(versions)))

    async def news(self) -> News:
        """See `Runtime.news`."""
        parts: list[News] = await self._of_all(
            "asking for news", self._parts.workers, lambda actor: actor.news.remote()
        )
        return sum(parts, News())

    async def tell(self, news: News) -> None:
        """See `Runtime.tell`."""
        await self._of_all("telling news", self._parts.workers, lambda actor: actor.tell.remote(news))

    async def recent(self, n: int) -> list[PlayedEpisode]:
        """See `Runtime.recent`."""
        played: list[PlayedEpisode] = await self._parts.workers[0].ask(
            "asking for episodes", lambda actor: actor.recent.remote(n)
        )
        return played

    async def activity(self, since_s: float) -> Activity:
        """See `Runtime.activity`."""
        self._raise_watched()
        parts = self._parts
        replicas, workers, busy, tools, _ = await asyncio.gather(
            self._stats_of(parts.replicas),
            self._stats_of(parts.workers),
            self._of_all("asking who was busy", parts.replicas, lambda actor: actor.busy_intervals.remote(since_s)),
            self._of_all("asking who was busy", parts.workers, lambda actor: actor.tool_intervals.remote(since_s)),
            parts.learner.ask("asking the learner", lambda actor: actor.__ray_ready__.remote()),
        )
        everyone = list(self._seen.values())
        return Activity(
            replicas=len(replicas),
            loaded_version=min((max(stats.versions, default=-1) for stats in replicas), default=-1),
            load_failures=sum(stats.load_failures for stats in everyone if isinstance(stats, ReplicaStats)),
            sampled_tokens=sum(stats.sampled_tokens for stats in everyone if isinstance(stats, ReplicaStats)),
            rolled_s=sum(stats.rolled_s for stats in everyone if isinstance(stats, ReplicaStats)),
            retried=sum(stats.retried for stats in everyone if isinstance(stats, WorkerStats)),
            resampled=sum(stats.resampled for stats in everyone if isinstance(stats, WorkerStats)),
            requests_running=sum(stats.running for stats in replicas),
            episodes_running=sum(stats.running for stats in workers),
            executing=tuple(interval for intervals in (*busy, *tools) for interval in intervals),
            faults=tuple(fault for stats in workers for fault in stats.faults),
            environments=total_counts([stats.environments for stats in everyone if isinstance(stats, WorkerStats)]),
            quarantined=tuple(row for stats in workers for row in stats.quarantined),
            warnings=(*self._server_warnings, *(_BEST_EFFORT for stats in workers if stats.durability == BEST_EFFORT)),
        )

    async def ledger(self) -> LedgerStats:
        """See `Runtime.ledger`."""
        return await self._reachable(self._connected().stats())

    async def fates(self) -> list[FateRow]:
        """See `Runtime.fates`."""
        return await self._reachable(self._next_fates(self._connected()))

    def restarts(self) -> Mapping[str, int]:
        """See `Runtime.restarts`."""
        return dict(self._supervision.restarts)

    async def _next_fates(self, ledger: PatientLedger) -> list[FateRow]:
        while True:
            epoch = (await ledger.stats()).epoch
            if epoch != self._fates_epoch:  # a ledger that was rebuilt counts its log anew (P8)
                self._fates_read, self._fates_epoch = 0, epoch
            try:
                rows, self._fates_read = await ledger.fates(self._fates_read, _FATE_ROWS)
            except LedgerAway:
                raise
            except LedgerError:
                if (await ledger.stats()).epoch == epoch:
                    raise
            else:
                return list(rows)

    async def close(self) -> None:
        """See `Runtime.close`."""
        may_ask = self._cluster.is_up and not (self._ledger_watch is not None and self._ledger_watch.done())
        watches = [each for each in (self._ledger_watch, self._cluster_watch, *self._pool_loops) if each is not None]
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
        self._ledger_watch = self._cluster_watch = None
        self._pool_loops = []
        if self._ray_start is not None:
            await asyncio.gather(self._ray_start, return_exceptions=True)  # a thread cannot be interrupted
            self._ray_start = None
        with contextlib.suppress(HeadraceError):
            await self._parts.close(_STOP_DEADLINE_S if may_ask else 0.0)
        if self._cluster.is_up:
            await self._placement.close()
        closings, self._closings = self._closings, []
        for closing in closings:
            await closing()
        self._ledger = None
        await asyncio.to_thread(self._cluster.close)
        if self._server is not None:
            await asyncio.to_thread(self._server.close)
            self._server = None

    # --- the watch ----------------------------------------------------------------------------------------------------

    async def _open_ledger(self) -> None:
        """Connect, make a ledger that is found in the run root trusted (P8), and watch it from now on."""
        config = self._context.config
        straight = await connect_ledger(self._context)
        self._server_warnings = tuple(straight.warnings)
        self._ledger = PatientLedger(straight, config.queue.away_deadline_s, self._say)

        registry, close_registry = await connect_registry(self._context, straight)
        self._closings += [close_registry, straight.close]

        async def reconcile() -> bool:
            return await wiring.reconcile_run(self._context, straight, registry)

        await reconcile()
        watch = LedgerWatch(straight, reconcile, self._supervision, config.queue.away_deadline_s, self._server)
        self._ledger_watch = asyncio.create_task(watch.run())

    def _say(self, text: str) -> None:
        _log.warning("%s", text)

    async def _watch_cluster(self) -> None:
        while True:
            await self._cluster.check()
            await asyncio.sleep(_CHECK_EVERY_S)

    def _raise_watched(self) -> None:
        """What the watches found ends the run, whatever is being waited for (case E9)."""
        for watch in (self._ledger_watch, self._cluster_watch, *self._pool_loops):
            if watch is not None and watch.done():
                watch.result()

    async def _reachable(self, call: Awaitable[T]) -> T:
        """The answer to something that waits for the ledger's server, unless that is known not to come back."""
        asking = asyncio.ensure_future(call)
        watch = self._ledger_watch
        try:
            await asyncio.wait({asking, *([watch] if watch is not None else [])}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done() and watch is not None:
                watch.result()
            return await asking
        finally:
            asking.cancel()

    # --- asking -------------------------------------------------------------------------------------------------------

    async def _of_all(self, what: str, parts: Sequence[RayPart], call: Callable[[Any], Awaitable[T]]) -> list[T]:
        return list(await asyncio.gather(*(part.ask(what, call) for part in parts)))

    async def _stats_of(self, parts: Sequence[RayPart]) -> list[Any]:
        """The counters of these parts. Those of every launch are kept, as sums go on over its death."""
        everyone = await self._of_all("asking for counters", parts, lambda actor: actor.stats.remote())
        for part, stats in zip(parts, everyone, strict=True):
            self._see(part, stats)
        return everyone

    def _see(self, part: RayPart, stats: ReplicaStats | WorkerStats) -> None:
        self._seen[part.name, part.launch] = stats

    async def _stop_worker(self, worker: RayPart) -> None:
        """Stop a worker; of one that is dead, the ledger ends what it played."""
        await worker.abandon_restart()
        if not self._cluster.is_up:
            return
        with contextlib.suppress(PartDied):
            await worker.ask("stopping rollouts", lambda actor: actor.stop.remote(), on_death="leave")

    def _longest_evaluation_s(self, episodes: int) -> float:
        """As many waves as it takes, each as long as the slowest episode may be."""
        config = self._context.config
        waves = -(-episodes // (config.rollout.workers * config.rollout.max_episodes))
        return waves * longest_episode_s(config) + CONTROL_DEADLINE_S

    async def _wait_loaded(self, version: int) -> list[RayPart]:
        """Wait until every replica serves `version`, or where each holds only one the one that is held to it (P22);
        returns those that do."""
        config, one = self._context.config, self._parts.holds_one
        deadline_s = config.serving.start_deadline_s + (longest_episode_s(config) if one else 0.0)
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    replicas = list(self._parts.replicas)
                    stats = await self._stats_of(replicas)
                    there = [part for part, each in zip(replicas, stats, strict=True) if _serves(each, version)]
                    if there if one else len(there) == len(replicas):
                        return there
                    await asyncio.sleep(_POLL_S)
        except DeadlineExceeded:
            raise
        except TimeoutError:
            which = "no replica" if one else "not every replica"
            raise DeadlineExceeded(f"{which} loaded version {version} within {deadline_s:g} s") from None

    def _connected(self) -> PatientLedger:
        if self._ledger is None:
            raise RunFailed("the ledger is not connected")
        return self._ledger


def _serves(stats: ReplicaStats, version: int) -> bool:
    """Whether a replica serves a version and will not give it up; one with room for others keeps what is held."""
    return version in stats.versions and not stats.is_draining and (stats.capacity > 1 or version in stats.held)
