"""Holders of trainable weights. `build_backend` knows them by name and imports only the one that is asked for."""

from collections.abc import Callable
from pathlib import Path

from headrace.platform.config.learner import LearnerConfig
from headrace.platform.contracts import LearnerBackend
from headrace.platform.errors import ConfigError


def _torch(model_dir: Path, config: LearnerConfig) -> LearnerBackend:
    from headrace.trainer.backends.torch import TorchBackend

    return TorchBackend(model_dir, config)


BACKENDS: dict[str, Callable[[Path, LearnerConfig], LearnerBackend]] = {"torch": _torch}


def build_backend(config: LearnerConfig, model_dir: str | Path) -> LearnerBackend:
    """The backend of one process that `config` names, with the weights of the Hugging Face folder `model_dir`.

    Raises ConfigError for one that is made of ranks (`ranked.py`).
    """
    if config.backend not in BACKENDS:
        raise ConfigError(f"learner.backend={config.backend} has processes of its own; it needs runtime.kind=ray")
    return BACKENDS[config.backend](Path(model_dir), config)
