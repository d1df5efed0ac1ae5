"""Evaluation of a run's versions: before, after and while it trains, apart from training data.

A version under evaluation is *held*: replicas keep it loaded, whatever is published meanwhile. At most one evaluation
runs at a time; the next one waits for it, and the learner with it. One that fails while training goes on is a note, not
the end of the run; the first and the last one must succeed. The version with the best mean score is kept as `best`: its
weights outlive retention, and `best.json` in the run root names it.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.deploy.context import RunContext
from headrace.deploy.evaluate import evaluation_digests
from headrace.deploy.progress import Progress
from headrace.deploy.run_totals import check_scored
from headrace.deploy.runtime import Runtime
from headrace.platform.errors import HeadraceError, PartDied
from headrace.platform.evaluation.record import evaluation_of, summary_line
from headrace.platform.evaluation.summary import summarize
from headrace.platform.observability.loggers import Loggers
from headrace.platform.observability.names import Metric
from headrace.platform.records.evaluation import Evaluation
from headrace.platform.store.evaluations import EvaluationStore
from headrace.platform.store.run_root import RunRoot

_log = logging.getLogger(__name__)
_TRIES = 3  # of an evaluation in which a process died


@dataclass(frozen=True, slots=True)
class Measured:
    """The share of scored episodes with a score of at least 1, and the mean score."""

    success: float
    score: float

    def __str__(self) -> str:
        graded = "" if self.success == self.score else f", mean score {self.score:.3f}"
        return f"success {self.success:.3f}{graded}"


def measured_of(evaluation: Evaluation) -> Measured:
    """What a scored evaluation came to."""
    overall = summarize(evaluation).overall
    success, score = overall.success, overall.mean_score
    return Measured(round(success.mean, 4) if success else 0.0, round(score.mean, 4) if score else 0.0)


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
        self._best: dict[str, Any] | None = None

    async def resume(self, best: Mapping[str, Any] | None) -> None:
        """The best version of a run that goes on, as `best.json` has it; its weights are kept."""
        if best is not None:
            self._best = {name: best[name] for name in ("version", "success", "score")}
            await self._runtime.keep([self._best["version"]])

    @property
    def best(self) -> dict[str, Any] | None:
        """Version, success and mean score of the best version so far, None before the first evaluation."""
        return self._best

    async def evaluate(self, version: int, step: int) -> Measured:
        """Evaluate what learner step `step` published, now.

        Raises:
            RunFailed: too few episodes gave a valid reward.
        """
        self._progress.stage(f"evaluating version {version}")
        await self._runtime.hold(version)
        try:
            for _ in range(_TRIES - 1):
                with contextlib.suppress(PartDied):
                    return await self._evaluate(version, step)
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
            measured = await self._evaluate(version, step)
            self._progress.note(f"version {version} on {self._config.split} tasks: {measured}")
        except HeadraceError as error:
            _log.warning("evaluation of version %d failed: %s", version, error)
            self._progress.note(f"evaluation of version {version} failed: {error}")
        finally:
            await self._runtime.let_go(version)

    async def _evaluate(self, version: int, step: int) -> Measured:
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
        check_scored(outcomes)
        figures = summary_line(evaluation)
        measured = measured_of(evaluation)
        figures |= {Metric.STAGE: "eval", Metric.LEARNER_STEP: step, Metric.EVAL_VERSION: version}
        self._metrics.append(figures)
        await self._consider(evaluation, measured)
        return measured

    async def _consider(self, evaluation: Evaluation, measured: Measured) -> None:
        """The first of equally good versions stays the best: training longer has not helped."""
        version = evaluation.version
        if version is None or (self._best is not None and measured.score <= self._best["score"]):
            return
        self._best = {"version": version, "success": measured.success, "score": measured.score}
        await self._keep(version)
        self._root.write_best({**self._best, "evaluation": evaluation.name})

    async def _keep(self, version: int) -> None:
        best = () if self._best is None else (self._best["version"],)
        await self._runtime.keep(sorted({*best, version}))
