"""What a run writes its metrics to: the file first and at once, the other loggers in the background.

    append ──► metrics.jsonl             (synchronous, always)
       └─────► queue of each logger ──►  its thread ──► W&B, TensorBoard, MLflow

Owns the numbering of steps and the deadline at the end. Nothing here raises because of a logger, or waits for one
before `close`. What a logger does with a record is its own file's business.
"""

import time
from collections.abc import Mapping
from dataclasses import asdict
from types import TracebackType
from typing import Any

from headrace.platform.config.secret_references import SecretValues
from headrace.platform.contracts import Clock
from headrace.platform.observability.loggers.background import BackgroundLogger
from headrace.platform.observability.loggers.contract import Point, RunLogger
from headrace.platform.observability.loggers.scalars import scalars
from headrace.platform.observability.metrics import MetricsFile, Value
from headrace.platform.observability.names import Metric

CAPACITY = 4096
"""Records that may wait per logger."""
CLOSE_DEADLINE_S = 30.0
"""How long `close` waits for all loggers together."""


class Loggers:
    """The metrics file and any number of loggers, used like `MetricsFile`. Threads may share it.

    Args:
        file: written synchronously and first.
        loggers: by kind; see `build_loggers`.
        clock: seconds since the epoch; the time of a record is the same everywhere.
        secrets: taken out of what is said about failures.
        capacity: records that may wait per logger.
    """

    def __init__(
        self,
        file: MetricsFile,
        loggers: Mapping[str, RunLogger],
        clock: Clock,
        secrets: SecretValues | None = None,
        capacity: int = CAPACITY,
    ) -> None:
        self._file = file
        self._clock = clock
        secrets = secrets if secrets is not None else SecretValues()
        self._loggers = [BackgroundLogger(name, logger, capacity, secrets) for name, logger in loggers.items()]
        self._learner_step = 0
        self._summary: Mapping[str, Any] = {}
        self._closed = False

    def start(self, run: str, config: Mapping[str, Any], root: str) -> None:
        """Open the run in every logger; returns at once. `config` is the recipe with its secrets as references, `root`
        a local folder (see `RunLogger.start`)."""
        for logger in self._loggers:
            logger.start(run, config, root)

    def append(self, values: Mapping[Metric, Value]) -> None:
        """Add one record.

        Its step is its learner step, else its step of a supervised stage, else the last learner step (0 before the
        first): an evaluation belongs to the weights that it measured.
        """
        now = self._clock()
        record = {Metric.TIME_S: now, **values}
        self._file.append(record)
        numbers = scalars(record)
        axis, step = self._place(numbers)
        if not numbers or self._closed:
            return
        point = Point(values=numbers, axis=axis, step=step, time_s=now)
        for logger in self._loggers:
            logger.offer(point)

    def _place(self, numbers: Mapping[str, float]) -> tuple[Metric, int]:
        if Metric.LEARNER_STEP in numbers:
            step = int(numbers[Metric.LEARNER_STEP])
            self._learner_step = max(self._learner_step, step)
            return Metric.LEARNER_STEP, step
        if Metric.SFT_STEP in numbers:
            return Metric.SFT_STEP, int(numbers[Metric.SFT_STEP])
        return Metric.LEARNER_STEP, self._learner_step

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Remember the run's summary for `close`; the last one counts."""
        self._summary = dict(summary)

    def close(self, deadline_s: float = CLOSE_DEADLINE_S) -> None:
        """End every logger; waits at most `deadline_s` for all of them together. Safe to call twice.

        It blocks, so an event loop calls it in a thread.
        """
        if self._closed:
            return
        self._closed = True
        for logger in self._loggers:
            logger.end(self._summary)
        end_s = time.monotonic() + deadline_s
        for logger in self._loggers:
            logger.join(end_s - time.monotonic())

    def reports(self) -> dict[str, dict[str, Any]]:
        """By logger: records `written`, `dropped` and `failed`, and the first `cause`. Fit for the summary."""
        return {logger.name: asdict(logger.report) for logger in self._loggers}

    def __enter__(self) -> "Loggers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
