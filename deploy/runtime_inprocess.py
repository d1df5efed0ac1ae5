"""Every part in this process, on one event loop, without Ray or a server: for tests, debugging and exactness.

The loop is lock-step and deterministic: rounds of groups are played until a batch is ready, then the learner steps.
The same recipe and seed give the same episodes and the same loss to the last digit. Engine, environments, registry,
store, learner and records are the real ones; the ledger is the in-memory implementation of the same contract. Of a run
that is resumed it learns what the manifests and the fate table say (P8).
"""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from headrace.actors.news import News
from headrace.actors.plan import PlayedEpisode
from headrace.deploy.connections import open_process_log, version_cache
from headrace.deploy.context import RunContext
from headrace.deploy.engines import build_engine
from headrace.deploy.runtime import Activity, Begun
from headrace.deploy.wiring import (
    assemble_learner,
    assemble_worker,
    copy_audit,
    open_doors,
    reconcile_run,
)
from headrace.platform.errors import RunFailed
from headrace.platform.ledger.memory import MemoryLedger
from headrace.platform.ledger.policy import batch_target
from headrace.platform.observability.logs import close_log
from headrace.platform.records.delivery import LedgerStats
from headrace.platform.records.evaluation import EpisodeOutcome
from headrace.platform.records.tables import FateRow
from headrace.platform.registry.adapters import load_base_of
from headrace.platform.registry.files import FileRegistry
from headrace.platform.registry.pins import MemoryPins
from headrace.trainer.report import StepReport

_FATE_ROWS = 10_000


class InprocessRuntime:
    """See the module."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._ledger = MemoryLedger(context.run, context.limits, time.time)
        self._registry = FileRegistry(
            context.root, self._ledger, cache_dir=version_cache(), run=context.run, pins=MemoryPins(time.time)
        )
        self._engine = build_engine(context.config, Path(), "inprocess", inline=True)
        self._closings: list[Callable[[], Awaitable[None]]] = []
        self._fates_read = 0
        self._held: set[int] = set()
        self._log: logging.Handler | None = None

    async def prepare(self) -> None:
        """See `Runtime.prepare`."""
        self._log = open_process_log(self._context, "inprocess")
        await reconcile_run(self._context, self._ledger, self._registry)

    async def begin(self, model_dir: Path) -> Begun:
        """See `Runtime.begin`."""
        context = self._context
        doors = await open_doors(context, 0, model_dir, self._engine)
        if doors is not None:
            self._closings.append(doors.close)
        self._worker = assemble_worker(
            context,
            0,
            model_dir,
            self._engine,
            self._newest_version,
            self._ledger,
            doorways=doors.doorways if doors is not None else None,
        )
        self._learner = assemble_learner(self._context, model_dir, self._ledger, self._registry, inline=True)
        self._closings += [self._worker.close, copy_audit(context).close]
        head = await self._learner.start()
        await self._follow()
        return Begun(head=head, steps=self._learner.steps)

    async def start_rollouts(self) -> None:
        """See `Runtime.start_rollouts`; here `step` plays them."""

    async def stop_rollouts(self) -> None:
        """See `Runtime.stop_rollouts`."""
        try:
            await self._worker.stop()
            await self._learner.close()
        finally:
            await self._ledger.stop("the run is over")

    async def step(self) -> StepReport:
        """See `Runtime.step`."""
        learner = self._context.config.learner
        deadline = time.monotonic() + learner.batch_deadline_s
        while True:
            stats = await self._ledger.stats()
            wanted = batch_target(
                stats.groups_ready, stats.zero_variance_since_commit, learner.batch_groups, learner.oversample_max
            )
            if stats.groups_ready >= wanted:
                break
            if time.monotonic() > deadline:
                raise RunFailed(
                    f"no batch within {learner.batch_deadline_s:g} s (learner.batch_deadline_s): since the last commit"
                    f" {stats.zero_variance_since_commit} groups had equal scores, {stats.groups_ready} are ready"
                )
            if not await self._worker.play_round(learner.batch_groups):
                raise RunFailed("the ledger admits no group and no batch is ready: nothing can go on")
        report = await self._learner.step()
        await self._follow()
        return report

    async def evaluate(self, version: int, split: str, tasks: int, samples: int, index: int) -> list[EpisodeOutcome]:
        """See `Runtime.evaluate`."""
        return await self._worker.evaluate(version, split, range(tasks), index, samples)

    async def hold(self, version: int) -> None:
        """See `Runtime.hold`."""
        self._held.add(version)

    async def let_go(self, version: int) -> None:
        """See `Runtime.let_go`."""
        self._held.discard(version)

    async def keep(self, versions: Sequence[int]) -> None:
        """See `Runtime.keep`."""
        self._learner.keep(versions)

    async def news(self) -> News:
        """See `Runtime.news`."""
        return self._worker.news()

    async def tell(self, news: News) -> None:
        """See `Runtime.tell`."""
        self._worker.tell(news)

    async def recent(self, n: int) -> list[PlayedEpisode]:
        """See `Runtime.recent`."""
        return self._worker.recent(n)

    async def activity(self, since_s: float) -> Activity:
        """See `Runtime.activity`."""
        stats = self._worker.stats()
        executing = [*self._engine.busy_intervals(since_s), *self._worker.tool_intervals(since_s)]
        return Activity(
            replicas=1,
            loaded_version=max(self._engine.versions(), default=-1),
            load_failures=0,  # a load that fails here ends the run
            sampled_tokens=self._engine.stats().sampled_tokens,
            requests_running=self._engine.stats().running,
            episodes_running=stats.running,
            executing=tuple(executing),
            faults=stats.faults,
            environments=stats.environments,
            quarantined=stats.quarantined,
        )

    async def ledger(self) -> LedgerStats:
        """See `Runtime.ledger`."""
        return await self._ledger.stats()

    async def fates(self) -> list[FateRow]:
        """See `Runtime.fates`."""
        rows, self._fates_read = await self._ledger.fates(self._fates_read, _FATE_ROWS)
        return list(rows)

    def restarts(self) -> Mapping[str, int]:
        """See `Runtime.restarts`."""
        return {}

    async def close(self) -> None:
        """See `Runtime.close`."""
        for closing in self._closings:
            await closing()
        await self._engine.close()
        await self._ledger.close()
        if self._log is not None:
            close_log(self._log)
            self._log = None

    def _newest_version(self) -> int | None:
        return max(self._engine.versions(), default=None)

    async def _follow(self) -> None:
        """Load the head and drop what is older than the recipe keeps."""
        manifest, path = await self._registry.open(self._learner.version)
        if manifest.ref.number not in self._engine.versions():
            await load_base_of(self._engine, self._registry, manifest)
            await self._engine.load(manifest, path)
        for version in sorted(self._engine.versions())[: -self._context.keep_versions]:
            if version not in self._held:
                await self._engine.retire(version)
