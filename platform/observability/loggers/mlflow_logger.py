"""MLflow: a run in a tracking server, or in the folder `logs/mlflow` of the run root.

MLflow calls its file store "in maintenance mode" and asks for a variable before it opens one; it is the only store that
`mlflow-skinny` opens without a database driver, so it is the default. `mlflow migrate-filestore` moves it.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.platform.config.loggers import MlflowConfig
from headrace.platform.config.secret_references import SecretValues, resolve
from headrace.platform.observability.loggers.contract import Point
from headrace.platform.observability.loggers.packages import load
from headrace.platform.observability.loggers.scalars import flat

_PARAMS_PER_CALL = 100
_VALUE_LIMIT = 6000
_NO_NAME = re.compile(r"[^\w\-./: ]")


class MlflowLogger:
    """See `RunLogger`. The tracking address is resolved when the run starts."""

    def __init__(self, config: MlflowConfig, secrets: SecretValues) -> None:
        self._config = config
        self._secrets = secrets
        self._client: Any = None
        self._entities: Any = None
        self._run_id = ""

    def start(self, run: str, config: Mapping[str, Any], root: str) -> None:
        """See `RunLogger.start`. The configuration becomes parameters with dotted names."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        uri = resolve(self._config.tracking_uri, self._secrets)
        if not uri:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            folder = Path(root).resolve() / "logs" / "mlflow"
            folder.mkdir(parents=True, exist_ok=True)
            uri = folder.as_uri()
        self._entities = load("mlflow.entities")
        self._client = load("mlflow.tracking").MlflowClient(tracking_uri=uri)
        self._run_id = self._client.create_run(self._experiment_id(), run_name=run).info.run_id
        params = [self._entities.Param(_name(key), _text(value)) for key, value in flat(config).items()]
        for start in range(0, len(params), _PARAMS_PER_CALL):
            self._client.log_batch(self._run_id, params=params[start : start + _PARAMS_PER_CALL])

    def _experiment_id(self) -> str:
        found = self._client.get_experiment_by_name(self._config.experiment)
        return str(found.experiment_id if found else self._client.create_experiment(self._config.experiment))

    def log(self, point: Point) -> None:
        """See `RunLogger.log`."""
        milliseconds = int(point.time_s * 1000)
        self._client.log_batch(
            self._run_id,
            metrics=[
                self._entities.Metric(_name(name), value, milliseconds, point.step)
                for name, value in point.values.items()
            ],
        )

    def finish(self, summary: Mapping[str, Any]) -> None:
        """See `RunLogger.finish`. The summary becomes tags with dotted names."""
        tags = [self._entities.RunTag(_name(key), _text(value)) for key, value in flat(summary).items()]
        for start in range(0, len(tags), _PARAMS_PER_CALL):
            self._client.log_batch(self._run_id, tags=tags[start : start + _PARAMS_PER_CALL])
        status = "FAILED" if "failed" in summary else "FINISHED" if summary else "KILLED"
        self._client.set_terminated(self._run_id, status=status)


def _name(key: str) -> str:
    """`key` without what MLflow takes in no name."""
    return _NO_NAME.sub("_", key)


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text[:_VALUE_LIMIT]
