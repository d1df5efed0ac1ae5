"""Weights & Biases: the configuration, the metrics and the summary of a run.

Console, code and repository are not recorded, and errors of the client are reported to nobody unless the user says so.
What W&B records about the machine by itself (packages, hardware, command line, system metrics) stays as it is.
W&B numbers rows by itself; the steps of headrace are values that its charts use as their axis, because its own step
must never fall while evaluations and supervised stages may arrive with any.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.platform.config.loggers import WandbConfig
from headrace.platform.config.secret_references import SecretValues, resolve
from headrace.platform.observability.loggers.contract import Point
from headrace.platform.observability.loggers.packages import load
from headrace.platform.observability.names import Metric

_INIT_TIMEOUT_S = 20.0
_FINISH_TIMEOUT_S = 20.0  # both below the deadline of `Loggers.close`: W&B waits at exit for what it has not given up
_ON_SFT_AXIS = (Metric.SFT_LOSS,)


class WandbLogger:
    """See `RunLogger`. The API key is resolved when the run starts, and is kept by W&B in memory only."""

    def __init__(self, config: WandbConfig, secrets: SecretValues) -> None:
        self._config = config
        self._secrets = secrets
        self._wandb: Any = None
        self._run: Any = None

    def start(self, run: str, config: Mapping[str, Any], root: str) -> None:
        """See `RunLogger.start`."""
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        folder = Path(root).resolve() / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        self._wandb = load("wandb")
        # Silent before `init`: W&B asks for a missing key on a terminal otherwise, in the middle of the run's output.
        self._wandb.setup(self._wandb.Settings(silent=True))
        try:
            self._run = self._init(run, config, folder)
            self._define_axes()
        except BaseException:
            self._end_service()
            raise

    def _init(self, run: str, config: Mapping[str, Any], folder: Path) -> Any:
        options: dict[str, Any] = {"console": "off", "disable_git": True, "disable_code": True, "save_code": False}
        options |= {"silent": True, "init_timeout": _INIT_TIMEOUT_S, "finish_timeout": _FINISH_TIMEOUT_S}
        if key := resolve(self._config.api_key, self._secrets):
            options["api_key"] = key
        return self._wandb.init(
            project=self._config.project,
            entity=self._config.entity or None,
            id=run,
            name=run,
            dir=str(folder),
            mode=self._config.mode,
            config=dict(config),
            reinit="create_new",
            settings=self._wandb.Settings(**options),
        )

    def _define_axes(self) -> None:
        for axis in (Metric.LEARNER_STEP, Metric.SFT_STEP):
            self._run.define_metric(axis.value)
        for metric in _ON_SFT_AXIS:
            self._run.define_metric(metric.value, step_metric=Metric.SFT_STEP.value)
        self._run.define_metric("*", step_metric=Metric.LEARNER_STEP.value)

    def _end_service(self) -> None:
        """End W&B's service process, unless the user has a run of their own in it."""
        if self._wandb.run is None:
            self._wandb.teardown()

    def log(self, point: Point) -> None:
        """See `RunLogger.log`."""
        self._run.log({**point.values, point.axis.value: point.step, "_timestamp": point.time_s})

    def finish(self, summary: Mapping[str, Any]) -> None:
        """See `RunLogger.finish`."""
        try:
            self._run.summary.update(dict(summary))
            self._run.finish(exit_code=0 if summary and "failed" not in summary else 1)
        finally:
            self._end_service()
