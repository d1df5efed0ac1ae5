"""The parts as Ray actors: engine replicas, rollout workers, the learner.

    driver (this) ── control calls ──► ReplicaActor x R   RolloutActor x W   LearnerActor
                                            ▲  token door      │ put             │ lease, commit
                                            └──────────────────┘                 ▼
                                                              embedded Valkey, or the recipe's server

The driver starts what is missing (a local Ray, an embedded server), hands each actor a builder from wiring.py, and
notices when one dies. It ends only what it started.
"""

import asyncio
import contextlib
import functools
import logging
import os
import secrets
import shutil
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from headrace.actors.outcomes import total_counts
from headrace.actors.plan import PlayedEpisode
from headrace.actors.rollout_actor import RolloutActor
from headrace.actors.tasks.curriculum import TaskResult
from headrace.deploy import wiring
from headrace.deploy.checks import check_cluster
from headrace.deploy.context import RunContext
from headrace.deploy.runtime import Activity
from headrace.platform.errors import ConfigError, DeadlineExceeded, HeadraceError, RunFailed
from headrace.platform.ledger.fate_log import drain_fates
from headrace.platform.ledger.redis_ledger import RedisLedger
from headrace.platform.ledger.server import EmbeddedServer
from headrace.platform.records.delivery import LedgerStats
from headrace.platform.records.evaluation import EpisodeOutcome
from headrace.platform.records.tables import FateRow
from headrace.serving.replica_actor import ReplicaActor
from headrace.trainer.learner_actor import LearnerActor
from headrace.trainer.report import StepReport

T = TypeVar("T")
_log = logging.getLogger(__name__)
_CONTROL_DEADLINE_S = 60.0
_STOP_DEADLINE_S = 20.0

_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}


def start_local_ray(cpus: int) -> None:
    """A Ray of this process's own with `cpus` logical CPUs; `keep_ray_local` must have been called before."""
    ray.init(
        num_cpus=cpus,
        include_dashboard=False,
        object_store_memory=100 * 1024 * 1024,
        _node_ip_address="127.0.0.1",
        **_QUIET,
    )


class RayRuntime:
    """See the module."""

    def __init__(self, context: RunContext) -> None:
        check_cluster(context.config)
        self._context = replace(context, door_token=secrets.token_hex(32))
        self._server: EmbeddedServer | None = None
        self._ray_start: asyncio.Task[None] | None = None
        self._replicas: list[Any] = []
        self._workers: list[Any] = []
        self._learner: Any = None
        self._ledger: RedisLedger | None = None
        self._owns_ray = False
        self._fates_read = 0

    async def prepare(self) -> None:
        """See `Runtime.prepare`."""
        config = self._context.config
        self._ray_start = asyncio.create_task(asyncio.to_thread(self._start_ray))
        url = config.queue.redis_url
        if not url:
            self._server = EmbeddedServer(Path(self._context.root) / "queue")
            url = await asyncio.to_thread(self._server.start)
        self._context = replace(self._context, ledger_url=url)
        self._ledger = await wiring.connect_ledger(self._context)
        await asyncio.shield(self._ray_start)
        options = {"num_cpus": 1, "max_concurrency": 16, "namespace": self._context.run}
        self._learner = LearnerActor.options(**options, name="learner").remote()
        for index in range(config.serving.replicas):
            self._replicas.append(ReplicaActor.options(**options, name=f"replica-{index}").remote())
        for index in range(config.rollout.workers):
            self._workers.append(RolloutActor.options(**options, name=f"rollout-{index}").remote())
        starts = [
            replica.start.remote(functools.partial(wiring.build_replica, self._context, index))
            for index, replica in enumerate(self._replicas)
        ]
        self._addresses = await self._all("starting the replicas", starts, config.serving.start_deadline_s)

    async def begin(self, model_dir: Path) -> int:
        """See `Runtime.begin`."""
        deadline_s = self._context.config.serving.start_deadline_s
        if self._context.config.runtime.ray_address:
            # The other nodes share the run root, but not this one's cache.
            model_dir = Path(shutil.copytree(model_dir, Path(self._context.root) / "base", dirs_exist_ok=True))
        build_learner = functools.partial(wiring.build_learner, self._context, model_dir)
        head: int = await self._one("starting the learner", self._learner.start.remote(build_learner), deadline_s)
        builds = [
            worker.build.remote(
                functools.partial(wiring.build_worker, self._context, index, model_dir, self._addresses)
            )
            for index, worker in enumerate(self._workers)
        ]
        await self._all("starting the rollout workers", builds, deadline_s)
        return head

    async def start_rollouts(self) -> None:
        """See `Runtime.start_rollouts`."""
        await self._all("starting rollouts", [worker.start.remote() for worker in self._workers])

    async def stop_rollouts(self) -> None:
        """See `Runtime.stop_rollouts`."""
        try:
            await self._all("stopping rollouts", [worker.stop.remote() for worker in self._workers])
        finally:  # whatever became of the workers; nobody is the learner afterwards
            if self._ledger is not None:
                await self._ledger.stop("the run is over")

    async def step(self) -> StepReport:
        """See `Runtime.step`."""
        deadline_s = 2 * self._context.config.learner.batch_deadline_s + _CONTROL_DEADLINE_S
        report: StepReport = await self._one("the learner step", self._learner.step.remote(), deadline_s)
        return report

    async def evaluate(self, version: int, split: str, tasks: int, samples: int, index: int) -> list[EpisodeOutcome]:
        """See `Runtime.evaluate`."""
        count = len(self._workers)
        await self._wait_loaded(version)
        parts: list[list[EpisodeOutcome]] = await self._all(
            "evaluating",
            [
                worker.evaluate.remote(version, split, list(range(start, tasks, count)), index, samples)
                for start, worker in enumerate(self._workers)
            ],
            self._longest_evaluation_s(tasks * samples),
        )
        return [outcome for part in parts for outcome in part]

    async def hold(self, version: int) -> None:
        """See `Runtime.hold`."""
        await self._all("holding a version", [replica.hold.remote(version) for replica in self._replicas])

    async def let_go(self, version: int) -> None:
        """See `Runtime.let_go`."""
        await self._all("letting a version go", [replica.let_go.remote(version) for replica in self._replicas])

    async def keep(self, versions: Sequence[int]) -> None:
        """See `Runtime.keep`."""
        await self._one("keeping versions", self._learner.keep.remote(list(versions)))

    async def task_results(self) -> list[TaskResult]:
        """See `Runtime.task_results`."""
        parts = await self._all("asking for scores", [worker.task_results.remote() for worker in self._workers])
        return [result for part in parts for result in part]

    async def observe(self, results: Sequence[TaskResult]) -> None:
        """See `Runtime.observe`."""
        await self._all("telling scores", [worker.observe.remote(list(results)) for worker in self._workers])

    async def recent(self, n: int) -> list[PlayedEpisode]:
        """See `Runtime.recent`."""
        played: list[PlayedEpisode] = await self._one("asking for episodes", self._workers[0].recent.remote(n))
        return played

    async def activity(self, since_s: float) -> Activity:
        """See `Runtime.activity`."""
        replicas = await self._all("asking the replicas", [replica.stats.remote() for replica in self._replicas])
        workers = await self._all("asking the workers", [worker.stats.remote() for worker in self._workers])
        busy = await self._all(
            "asking who was busy",
            [replica.busy_intervals.remote(since_s) for replica in self._replicas]
            + [worker.tool_intervals.remote(since_s) for worker in self._workers],
        )
        return Activity(
            replicas=len(replicas),
            loaded_version=min((max(stats.versions, default=-1) for stats in replicas), default=-1),
            load_failures=sum(stats.load_failures for stats in replicas),
            sampled_tokens=sum(stats.sampled_tokens for stats in replicas),
            requests_running=sum(stats.running for stats in replicas),
            episodes_running=sum(stats.running for stats in workers),
            executing=tuple(interval for intervals in busy for interval in intervals),
            faults=tuple(fault for stats in workers for fault in stats.faults),
            environments=total_counts([stats.environments for stats in workers]),
        )

    async def ledger(self) -> LedgerStats:
        """See `Runtime.ledger`."""
        return await self._connected().stats()

    async def fates(self) -> list[FateRow]:
        """See `Runtime.fates`."""
        rows, self._fates_read = await drain_fates(self._connected(), self._fates_read)
        return rows

    async def close(self) -> None:
        """See `Runtime.close`."""
        if self._ray_start is not None:
            await asyncio.gather(self._ray_start, return_exceptions=True)  # a thread cannot be interrupted
            self._ray_start = None
        closings = [actor.close.remote() for actor in (*self._workers, *self._replicas)]
        with contextlib.suppress(HeadraceError):
            await self._all("closing", closings, _STOP_DEADLINE_S)
        for actor in (*self._workers, *self._replicas, *([self._learner] if self._learner else [])):
            with contextlib.suppress(RayError):
                ray.kill(actor)
        self._workers, self._replicas, self._learner = [], [], None
        if self._ledger is not None:
            await self._ledger.close()
            self._ledger = None
        if self._owns_ray:
            await asyncio.to_thread(ray.shutdown)
            self._owns_ray = False
        if self._server is not None:
            await asyncio.to_thread(self._server.close)
            self._server = None

    # --- Ray ----------------------------------------------------------------------------------------------------------

    def _start_ray(self) -> None:
        """Join the recipe's cluster or the Ray of this process, or start a local one."""
        config = self._context.config
        demand = config.serving.replicas + config.rollout.workers + 1
        address = config.runtime.ray_address
        if not ray.is_initialized():
            self._owns_ray = True
            if address:
                ray.init(address=address, namespace=self._context.run, **_QUIET)
            else:
                start_local_ray(max(os.cpu_count() or 1, demand))
        resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        there = resources.get("CPU", 0.0)
        if there < demand:  # P23: demands are checked before anything starts
            raise ConfigError(
                f"the run needs {demand} CPUs ({config.serving.replicas} replicas, {config.rollout.workers} rollout"
                f" workers, 1 learner) and the Ray cluster has {there:g}; lower serving.replicas or rollout.workers"
            )

    def _longest_evaluation_s(self, episodes: int) -> float:
        """As many waves as it takes, each as long as the slowest episode may be."""
        config = self._context.config
        waves = -(-episodes // (config.rollout.workers * config.rollout.max_episodes))
        slowest_s = max(e.reset_deadline_s + e.budgets.max_seconds + 2 * e.step_deadline_s for e in config.environments)
        return waves * slowest_s + _CONTROL_DEADLINE_S

    async def _wait_loaded(self, version: int) -> None:
        """Wait until every replica serves `version`."""
        deadline_s = self._context.config.serving.start_deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    stats = await self._all("asking", [replica.stats.remote() for replica in self._replicas])
                    if all(version in each.versions for each in stats):
                        return
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise DeadlineExceeded(f"not every replica loaded version {version} within {deadline_s} s") from None

    async def _one(self, what: str, reference: Awaitable[Any], deadline_s: float = _CONTROL_DEADLINE_S) -> Any:
        with _named(what):
            async with asyncio.timeout(deadline_s):
                return await reference

    async def _all(self, what: str, references: list[Any], deadline_s: float = _CONTROL_DEADLINE_S) -> list[Any]:
        with _named(what):
            async with asyncio.timeout(deadline_s):
                return list(await asyncio.gather(*references))

    def _connected(self) -> RedisLedger:
        if self._ledger is None:
            raise RunFailed("the ledger is not connected")
        return self._ledger


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    """Ray's errors as headrace's, with what was being done."""
    try:
        yield
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, HeadraceError):
            raise cause from None
        raise RunFailed(f"{what}: {cause}") from error
    except RayActorError as error:
        raise RunFailed(f"{what}: a process of the run died: {error}") from error
    except TimeoutError as error:
        if isinstance(error, HeadraceError):
            raise
        raise DeadlineExceeded(f"{what} took too long") from None
