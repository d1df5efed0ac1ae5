"""Where metrics go besides `metrics.jsonl`, which is always written.

Nothing leaves the machine unless it is asked for by name. Secrets are references only (docs/design.md section 6.10).
"""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator

from headrace.platform.config.base import StrictModel

_REFERENCE = re.compile(r"\$\{(env|file):[^}]+\}")


class WandbConfig(StrictModel):
    """Weights & Biases, as `pip install 'headrace[wandb]'` brings it. The run's folder is `logs/wandb` in its root."""

    kind: Literal["wandb"]
    project: str = "headrace"
    entity: str = ""
    """User or team; empty means the account's default."""
    mode: Literal["offline", "online"] = "offline"
    """`offline` writes files that `wandb sync` can send later; `online` sends the configuration,
    the metrics and W&B's own facts about the machine at once."""
    api_key: str = ""
    """A reference such as `${env:WANDB_API_KEY}`; empty means what `wandb login` or the environment gives."""

    @field_validator("api_key")
    @classmethod
    def _refers(cls, value: str) -> str:
        if value and not _REFERENCE.fullmatch(value):
            raise ValueError("write a reference such as ${env:WANDB_API_KEY}: the configuration is stored with the run")
        return value


class TensorboardConfig(StrictModel):
    """TensorBoard event files in `logs/tensorboard` of the run root (`pip install 'headrace[tensorboard]'`)."""

    kind: Literal["tensorboard"]


class MlflowConfig(StrictModel):
    """MLflow tracking (`pip install 'headrace[mlflow]'`)."""

    kind: Literal["mlflow"]
    tracking_uri: str = ""
    """A server or store; empty means the folder `logs/mlflow` in the run root. Passwords by reference."""
    experiment: str = Field("headrace", min_length=1)
    """Made when it does not exist."""


LoggerConfig = Annotated[WandbConfig | TensorboardConfig | MlflowConfig, Field(discriminator="kind")]


def _each_kind_once(value: tuple[LoggerConfig, ...]) -> tuple[LoggerConfig, ...]:
    kinds = [config.kind for config in value]
    if twice := sorted({kind for kind in kinds if kinds.count(kind) > 1}):
        raise ValueError(f"each kind of logger may be listed once; twice: {', '.join(twice)}")
    return value


LoggerConfigs = Annotated[tuple[LoggerConfig, ...], AfterValidator(_each_kind_once)]
