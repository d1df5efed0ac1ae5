"""Which kinds of loggers there are, how a configuration becomes loggers, and what it must find beforehand."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.platform.config.loggers import LoggerConfig, WandbConfig
from headrace.platform.config.secret_references import SecretValues, resolve
from headrace.platform.errors import ConfigError
from headrace.platform.observability.loggers.contract import RunLogger
from headrace.platform.observability.loggers.mlflow_logger import MlflowLogger
from headrace.platform.observability.loggers.packages import require
from headrace.platform.observability.loggers.tensorboard_logger import TensorboardLogger
from headrace.platform.observability.loggers.wandb_logger import WandbLogger

LOGGERS: dict[str, Callable[[Any, SecretValues], RunLogger]] = {
    "wandb": WandbLogger,
    "tensorboard": TensorboardLogger,
    "mlflow": MlflowLogger,
}
"""By kind, which is also the name of the package and of the extra."""


def build_loggers(configs: Sequence[LoggerConfig], secrets: SecretValues) -> dict[str, RunLogger]:
    """The loggers by kind. Nothing is imported or opened before they start; what they resolve goes into `secrets`."""
    return {config.kind: LOGGERS[config.kind](config, secrets) for config in configs}


def check_loggers(configs: Sequence[LoggerConfig], env: Mapping[str, str] = os.environ) -> None:
    """Refuse loggers that could not work, before anything starts. Imports none of their packages.

    Raises:
        ConfigError: a package or a secret is missing; the message names the fix.
    """
    for config in configs:
        require(config.kind)
        for value in config.model_dump().values():
            resolve(value, env=env)
        if isinstance(config, WandbConfig) and config.mode == "online":
            _check_wandb_login(config, env)


def _check_wandb_login(config: WandbConfig, env: Mapping[str, str]) -> None:
    """W&B would ask for a key on the terminal, or fail; both too late."""
    netrc = [Path(env["NETRC"])] if env.get("NETRC") else [Path.home() / ".netrc", Path.home() / "_netrc"]
    named = config.api_key or env.get("WANDB_API_KEY") or env.get("WANDB_IDENTITY_TOKEN_FILE")
    if not named and not any(path.is_file() for path in netrc):
        raise ConfigError(
            "loggers: wandb is online, but there is no API key: run `wandb login`, set WANDB_API_KEY,"
            " or use mode: offline and `wandb sync` later"
        )
