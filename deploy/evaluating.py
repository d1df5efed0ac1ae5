"""Evaluation of a run's versions: before, after and while it trains, apart from training data.

A version under evaluation is *held*: replicas keep it loaded, whatever is published meanwhile. At most one evaluation
runs at a time; the next one waits for it, and the learner with it. One that fails while training goes on is a note, not
the end of the run; the first and the last one must succeed. The version with the best mean score is kept as `best`: its
weights outlive retention, and `best.json` in the run root names it.
"""

import asyncio
import logging
import time
from typing import Any

from headrace.deploy.context import RunContext
from headrace.deploy.evaluate import evaluation_digests
from headrace.deploy.progress import Progress
from headrace.deploy.run_totals import mean_success
from headrace.deploy.runtime import Runtime
from headrace.platform.errors import HeadraceError
from headrace.platform.evaluation.record import evaluation_of, summary_line
from headrace.platform.observability.loggers import Loggers
from headrace.platform.observability.names import Metric
from headrace.platform.records.evaluation import Evaluation
from headrace.platform.store.evaluations import EvaluationStore
from headrace.platform.store.run_root import RunRoot

_log = logging.getLogger(__name__)


class Evaluations:
    """See the module. `renderer_digest` is that of the model's renderer."""

    def __init__(
        self,
        context: RunContext,
        root: RunRoot,
        runtime: Runtime,
        metrics: Loggers,
        progress: Progress,
        renderer_digest: str,
    ) -> None:
        self._context, self._config = context, context.config.eval
        self._root, self._runtime = root, runtime
        self._metrics, self._progress = metrics, progress
        self._store = EvaluationStore(root.url)
        self._digests = evaluation_digests(context.config, renderer_digest)
        self._running: asyncio.Task[None] | None = None
        self._best: tuple[float, int] | None = None

    @property
    def best(self) -> dict[str, Any] | None:
        """Version and mean score of the best version so far, None before the first evaluation."""
        return None if self._best is None else {"version": self._best[1], "success": self._best[0]}

    async def evaluate(self, version: int, step: int) -> float:
        """Evaluate what learner step `step` published, now; returns the mean score.

        Raises:
            RunFailed: too few episodes gave a valid reward.
        """
        self._progress.stage(f"evaluating version {version}")
        await self._runtime.hold(version)
        try:
            return await self._evaluate(version, step)
        finally:
            await self._runtime.let_go(version)

    async def begin(self, step: int, version: int) -> None:
        """Start an evaluation of the version that learner step `step` published, where one is due; it goes on while
        the learner steps."""
        if not self._config.every or step % self._config.every:
            return
        await self.finish()
        await self._runtime.hold(version)
        await self._keep(version)
        self._running = asyncio.create_task(self._beside_training(version, step))

    async def finish(self) -> None:
        """Wait for the evaluation that is running, if any."""
        running, self._running = self._running, None
        if running is not None:
            await running

    async def abandon(self) -> None:
        """End the evaluation that is running, if any: its run is over."""
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _beside_training(self, version: int, step: int) -> None:
        try:
            mean = await self._evaluate(version, step)
            self._progress.note(f"success of version {version} on {self._config.split} tasks: {mean:.3f}")
        except HeadraceError as error:
            _log.warning("evaluation of version %d failed: %s", version, error)
            self._progress.note(f"evaluation of version {version} failed: {error}")
        finally:
            await self._runtime.let_go(version)

    async def _evaluate(self, version: int, step: int) -> float:
        config = self._config
        claim = await asyncio.to_thread(self._store.claim, version, config.split, config.samples)
        outcomes = await self._runtime.evaluate(version, config.split, config.tasks, config.samples, claim.index)
        evaluation = evaluation_of(
            outcomes,
            name=claim.name,
            run=self._context.run,
            model=self._root.name,
            version=version,
            split=config.split,
            tasks=config.tasks,
            samples=config.samples,
            created_at_s=time.time(),
            digests=self._digests,
        )
        await asyncio.to_thread(self._store.write, evaluation)
        mean = mean_success(outcomes)
        figures = summary_line(evaluation)
        figures |= {Metric.STAGE: "eval", Metric.LEARNER_STEP: step, Metric.EVAL_VERSION: version}
        self._metrics.append(figures)
        await self._consider(evaluation, mean)
        return mean

    async def _consider(self, evaluation: Evaluation, mean: float) -> None:
        """The first of equally good versions stays the best: training longer has not helped."""
        version = evaluation.version
        if version is None or (self._best is not None and mean <= self._best[0]):
            return
        self._best = (mean, version)
        await self._keep(version)
        self._root.write_best({"version": version, "success": mean, "evaluation": evaluation.name})

    async def _keep(self, version: int) -> None:
        best = () if self._best is None else (self._best[1],)
        await self._runtime.keep(sorted({*best, version}))
