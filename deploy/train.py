"""The conductor: one run from recipe to summary.

    base model (supervised stages, cached)  ─┐
    runtime.prepare (servers, actors)       ─┴─► begin ─► evaluate ─► rollouts on ─► learner steps ─► rollouts off
                                                                                          ▲              │
                                                        watch: faults, dead parts ────────┘   evaluate ◄─┘ ─► summary

The parts do not know this file: it builds nothing (wiring.py does) and decides only the order, when to stop, and what
to write down. Evaluations (evaluating.py) also go on beside learner steps, where the recipe asks for it. Parts that die
are the runtime's business; a learner that was started again repeats the steps since its checkpoint, and their numbers
with them. A run that is resumed goes through the same file: `past` (resume.py) has what it need not measure again.
"""

import asyncio
import contextlib
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from headrace.actors.news import News
from headrace.actors.quarantine import Quarantine, QuarantinedTask, QuarantineFile
from headrace.actors.rendering import load_renderer
from headrace.deploy.base_model import BaseModel, SftStep, prepare_base_model
from headrace.deploy.breaker import Breaker
from headrace.deploy.context import RunContext
from headrace.deploy.evaluating import Evaluations, Measured
from headrace.deploy.progress import Progress, RunState
from headrace.deploy.resume import Past
from headrace.deploy.run_totals import Totals, discarded, fate_totals, step_metrics, total_safety, trained_by_length
from headrace.deploy.runtime import Begun, Runtime
from headrace.deploy.samples import write_samples
from headrace.deploy.wiring import environment_versions, known_news
from headrace.platform.config import RunConfig
from headrace.platform.config.load import dump_yaml
from headrace.platform.config.secret_references import SecretValues
from headrace.platform.errors import DeadlineExceeded, HeadraceError, RunFailed
from headrace.platform.observability.busy import overlap, union
from headrace.platform.observability.figure import learning_curve
from headrace.platform.observability.loggers import Loggers, build_loggers
from headrace.platform.observability.metrics import MetricsFile
from headrace.platform.observability.names import Metric
from headrace.platform.observability.parts import Part
from headrace.platform.store.episodes import EpisodeStore
from headrace.platform.store.events import Events, RunEvent
from headrace.platform.store.run_root import RunRoot
from headrace.platform.store.tables import FateTable
from headrace.trainer.report import StepReport

_log = logging.getLogger(__name__)
_WATCH_EVERY_S = 0.5
_STOP_DEADLINE_S = 30.0
_SAMPLES_PER_EPISODE_LOGGED = 16  # the best and the worst are chosen among them


class _Stopped(Exception):
    """Ends the supervised stages when the run is interrupted."""


def create_run(config: RunConfig) -> tuple[RunContext, RunRoot]:
    """A new run with its root."""
    run = f"{config.name}-{secrets.token_hex(3)}"
    root = RunRoot.create(config.runs_dir, run, dump_yaml(config))
    return RunContext(run=run, root=root.url, config=config), root


async def train(
    context: RunContext, root: RunRoot, runtime: Runtime, state: RunState, progress: Progress, past: Past | None = None
) -> dict[str, Any]:
    """Carry the run through, from its beginning or, with `past`, from its last checkpoint; returns its summary, which
    is also written to the run root. The caller holds the run's lock.

    Raises:
        RunFailed: the run cannot go on; what was written until then stays.
    """
    conductor = _Conductor(context, root, runtime, state, progress, past)
    try:
        return await conductor.run()
    except asyncio.CancelledError:
        conductor.leave_summary("interrupted")
        raise
    except Exception as error:  # whatever ended the run is written down, and raised on
        conductor.leave_summary(str(error) if isinstance(error, HeadraceError) else repr(error))
        raise
    finally:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2 * _STOP_DEADLINE_S):
                await runtime.close()
        await conductor.close()


class _Conductor:
    def __init__(
        self,
        context: RunContext,
        root: RunRoot,
        runtime: Runtime,
        state: RunState,
        progress: Progress,
        past: Past | None,
    ) -> None:
        self._context, self._config = context, context.config
        self._root, self._runtime = root, runtime
        self._state, self._progress = state, progress
        self._past, self._begun = past, False
        self._warned: list[str] = []
        self._events = Events(root.url, time.time)
        self._part = Part(root.url, "driver")
        secrets = SecretValues()
        self._metrics = Loggers(
            MetricsFile(root.metrics, time.time), build_loggers(self._config.loggers, secrets), time.time, secrets
        )
        self._fates = FateTable(context.root, "driver")
        self._quarantine, self._out = QuarantineFile(context.root), Quarantine()
        self._totals = Totals()
        self._summary: dict[str, Any] = {"run": context.run, "recipe": self._config.name, "seed": self._config.seed}

    async def run(self) -> dict[str, Any]:
        self._part.start()
        self._events.add(RunEvent.RESUMED if self._past else RunEvent.STARTED)
        allowed = {name: sorted(versions) for name, versions in environment_versions(self._config).items()}
        self._events.add(RunEvent.ENVIRONMENTS_ALLOWED, environments=allowed)
        self._metrics.start(self._context.run, self._config.model_dump(mode="json"), str(self._context.local(".")))
        base = await self._base_and_runtime()
        self._renderer = load_renderer(base.path)
        self._evaluations = Evaluations(
            self._context, self._root, self._runtime, self._metrics, self._progress, self._renderer.digest
        )
        self._summary["sft"] = {"cached": base.cached, "stages": list(base.stages)}
        self._stage("starting the parts")
        begun = await self._runtime.begin(base.path)
        self._begun = True
        self._totals.version, self._totals.steps = begun.head, begun.steps
        await self._before(begun)
        if begun.steps < self._config.learner.steps:
            await self._learn()
        else:  # it was ended after its last step
            await self._end_rollouts()
        after = await self._evaluate(self._totals.version, self._totals.steps)
        self._summary.update(success_after=after.success, score_after=after.score)
        self._summary["best"] = self._evaluations.best
        self._stage("putting the episodes in order")
        await asyncio.to_thread(self._compact)
        learning_curve(self._root.metrics, self._root.join("figures/learning_curve.png"), self._context.run)
        return self._finish()

    def _stage(self, name: str) -> None:
        self._progress.stage(name)
        self._part.set(name)

    async def _evaluate(self, version: int, step: int) -> Measured:
        self._part.set(f"evaluating version {version}")
        return await self._evaluations.evaluate(version, step)

    async def _before(self, begun: Begun) -> None:
        """What the policy could do before reinforcement learning, and what a resumed run need not find out again."""
        past = self._past or Past()
        if self._past:
            self._root.write_config(dump_yaml(self._config))
            self._totals.bubble_s = past.bubble_s
        await self._evaluations.resume(past.best)
        if past.before is not None:
            before = Measured(*past.before)
            self._progress.note(f"resumed at learner step {begun.steps}, version {begun.head}")
        else:
            before = await self._evaluate(begun.head, begun.steps)
            self._metrics.append({Metric.STAGE: "sft", Metric.SFT_SUCCESS: before.score})
            self._progress.note(f"before reinforcement learning: {before}")
        self._summary.update(success_before=before.success, score_before=before.score)
        if self._past:
            known = await asyncio.to_thread(known_news, self._context)
            self._out.observe(known.quarantined)
            await self._runtime.tell(known)

    def _compact(self) -> None:
        """One file of episodes per policy version instead of hundreds."""
        store = EpisodeStore(self._context.root)
        for version in range(self._totals.version + 1):
            store.compact(version)

    async def _base_and_runtime(self) -> BaseModel:
        """Supervised stages in a thread, while servers and processes come up."""
        stop = threading.Event()

        def on_progress(step: SftStep) -> None:
            if stop.is_set():
                raise _Stopped
            self._progress.sft(step)
            if step.success is not None:
                self._metrics.append(
                    {Metric.STAGE: f"sft {step.stage}", Metric.SFT_STEP: step.step, Metric.SFT_LOSS: step.loss}
                )

        self._stage("supervised stages" if self._config.sft else "loading the model")
        stages = asyncio.create_task(asyncio.to_thread(prepare_base_model, self._config, on_progress))
        preparing = asyncio.create_task(self._runtime.prepare())
        try:
            base, _ = await asyncio.gather(stages, preparing)
        except BaseException:
            stop.set()
            preparing.cancel()
            await asyncio.gather(stages, preparing, return_exceptions=True)
            raise
        if base.cached and base.stages:
            self._progress.note("supervised stages: cached")
        return base

    async def _learn(self) -> None:
        """The asynchronous part: rollouts play while the learner steps."""
        self._stage("reinforcement learning")
        self._state.steps = self._config.learner.steps
        await self._runtime.start_rollouts()
        self._totals.at_s = time.time()
        watching = asyncio.create_task(self._watch())
        try:
            await self._steps(watching)
        except BaseException:
            # In a task of its own, as a cancelled one is refused by whoever guards its cancellations. What else fails
            # now is not told: the first cause counts.
            await asyncio.gather(asyncio.create_task(self._stop(watching)), return_exceptions=True)
            raise
        await self._evaluations.finish()
        await self._share_quarantine((await self._runtime.activity(time.time())).quarantined)
        await self._stop(watching)

    async def _steps(self, watching: asyncio.Task[None]) -> None:
        began, first = time.monotonic(), self._totals.steps
        while self._totals.steps < self._config.learner.steps:
            stepping = asyncio.ensure_future(self._runtime.step())
            try:
                await asyncio.wait({stepping, watching}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not stepping.done():
                    stepping.cancel()
                    await asyncio.gather(stepping, return_exceptions=True)
            if watching.done():
                watching.result()
            report = stepping.result()
            done = max(report.step - first, 1)
            await self._record(report, (time.monotonic() - began) / done)
            await self._share_scores()
            await self._log_samples(report.step)
            if report.published and report.step < self._config.learner.steps:
                await self._evaluations.begin(report.step, report.version)

    async def _watch(self) -> None:
        """Ends with an error when the run should stop: too many failures (E8), or a part that died (E9)."""
        breaker = Breaker(self._config.queue.max_failure_rate)
        while True:
            await asyncio.sleep(_WATCH_EVERY_S)
            activity = await self._runtime.activity(time.time())
            for warning in set(activity.warnings).difference(self._warned):
                self._warned.append(warning)
                self._progress.note(warning)
            await self._share_quarantine(activity.quarantined)
            stats = await self._runtime.ledger()
            if cause := breaker.cause(stats, activity.faults, sum(self._runtime.restarts().values())):
                raise RunFailed(cause)

    async def _share_scores(self) -> None:
        """Every worker's curriculum learns what all of them scored."""
        if self._config.curriculum.kind == "success_window" and (news := await self._runtime.news()):
            await self._runtime.tell(news)

    async def _share_quarantine(self, rows: Sequence[QuarantinedTask]) -> None:
        """A task that one worker has found broken is written down, and played by none."""
        if fresh := self._out.observe(rows):
            await asyncio.to_thread(self._quarantine.append, fresh)
            for row in fresh:
                self._progress.note(f"task {row.task_id} of {row.environment} is out: {row.reason}")
            await self._runtime.tell(News(quarantined=tuple(fresh)))

    async def _log_samples(self, step: int) -> None:
        """Some episodes for people to read. Fails open: what cannot be written is in the log."""
        config = self._config.log_samples
        if config is not None and step % config.every == 0:
            recent = await self._runtime.recent(_SAMPLES_PER_EPISODE_LOGGED * config.n)
            await asyncio.to_thread(write_samples, self._root, recent, self._renderer, step, config.n)

    async def _stop(self, watching: asyncio.Task[None]) -> None:
        """End the rollouts and close the books, however the steps ended."""
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await self._evaluations.abandon()
        await self._end_rollouts()

    async def _end_rollouts(self) -> None:
        try:
            async with asyncio.timeout(_STOP_DEADLINE_S):
                await self._runtime.stop_rollouts()
        except DeadlineExceeded:
            raise
        except TimeoutError:
            raise DeadlineExceeded(f"the rollouts did not stop within {_STOP_DEADLINE_S:g} s") from None
        finally:
            await self._close_books()

    async def _record(self, report: StepReport, seconds_per_step: float) -> None:
        totals, state = self._totals, self._state
        stats = await self._runtime.ledger()
        activity = await self._runtime.activity(report.busy[0])
        now = time.time()
        totals.lags = Counter(stats.lags)
        totals.bubble_s += report.wait_s
        for note in totals.warned(report):
            self._progress.note(note)
        totals.length_bias |= report.length_bias or stats.protection_lost > 0
        totals.busy_s += report.busy_s
        totals.overlapped_s += overlap([report.busy], union(activity.executing))
        totals.steps, totals.version = report.step, report.version
        played = stats.score_count - totals.scores[1]
        success = (stats.score_sum - totals.scores[0]) / played if played else None
        span_s = max(now - totals.at_s, 1e-9)
        state.step = report.step
        state.success = success if success is not None else state.success
        state.lag = f"max {max(report.lags)}" if report.lags else ""
        state.queue = f"{stats.groups_ready} ready, {stats.groups_open} open"
        state.episodes_per_s = played / span_s
        state.tokens_per_s = (activity.sampled_tokens - totals.tokens) / span_s
        state.left_s = seconds_per_step * (state.steps - report.step)
        totals.scores, totals.tokens, totals.at_s = (stats.score_sum, stats.score_count), activity.sampled_tokens, now
        self._part.note(step=report.step, version=report.version, ready=stats.groups_ready, playing=stats.groups_open)
        restarts = self._runtime.restarts()
        self._metrics.append(step_metrics(report, stats, activity, state, totals, restarts))
        totals.environments = activity.environments
        self._progress.learner_step()
        await self._write_fates()

    async def _write_fates(self) -> None:
        """Page by page: the ledger forgets a page when the next one is asked for, and by then it is written."""
        while rows := await self._runtime.fates():
            await asyncio.to_thread(self._fates.append, rows)

    async def _close_books(self) -> None:
        stats = await self._runtime.ledger()
        await self._write_fates()
        self._totals.lags = Counter(stats.lags)
        self._summary["fates"] = fate_totals(stats)
        self._summary["discarded"] = discarded(stats.fates)
        self._summary["discarded_time"] = discarded(stats.slot_seconds)
        self._summary["trained_by_length"] = trained_by_length(stats)
        self._summary["ledger_epoch"] = stats.epoch
        self._summary["equation_holds"] = stats.holds
        self._summary["puts_refused"] = stats.refused

    def _finish(self) -> dict[str, Any]:
        totals = self._totals
        self._summary.update(
            seconds=round(time.monotonic() - self._state.began + (self._past.seconds if self._past else 0.0), 2),
            learner_steps=totals.steps,
            version=totals.version,
            lag_max_trained=max(totals.lags, default=0),
            lag_share_ge1=round(totals.lag_share_ge1, 4),
            lags={str(lag): n for lag, n in sorted(totals.lags.items())},
            bubble_s=round(totals.bubble_s, 2),
            length_bias=totals.length_bias,
            gap_alarms=dict(totals.gap_alarms),
            off_policy_warnings=totals.off_policy_warnings,
            restarts=dict(self._runtime.restarts()),
            warnings=self._warned,
            quarantined=len(self._out.rows()),
            safety=total_safety(totals.environments).facts(),
            overlap=round(totals.overlapped_s / totals.busy_s, 4) if totals.busy_s else 0.0,
            root=self._context.root,
        )
        self._root.write_summary(self._summary)
        self._metrics.finish(self._summary)
        self._events.add(RunEvent.ENDED, cause=self._summary.get("failed", ""))
        return self._summary

    async def close(self) -> None:
        """Let the loggers send what they have; what they could not is said."""
        await asyncio.to_thread(self._part.close)
        await asyncio.to_thread(self._metrics.close)
        for name, report in self._metrics.reports().items():
            if report["cause"]:
                self._progress.note(f"the logger {name} lost records: {report['cause']}")

    def leave_summary(self, cause: str) -> None:
        """Write down how far the run came and why it ended; a resume that never began leaves the run as it was. Fails
        open: a full disk may be the cause (P23)."""
        self._summary["failed"] = cause
        if self._past is not None and not self._begun:
            return
        try:
            self._finish()
        except OSError as error:
            _log.warning("the summary could not be written: %s", error)
