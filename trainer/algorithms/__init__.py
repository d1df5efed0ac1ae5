"""Ways to turn scores into gradients. `build_algorithm` knows them by name."""

from collections.abc import Callable
from typing import Any

from headrace.platform.config.algorithm import AlgorithmConfig
from headrace.trainer.algorithms.gigpo import Gigpo
from headrace.trainer.algorithms.grpo import Grpo
from headrace.trainer.algorithms.reinforce import Reinforce
from headrace.trainer.algorithms.rloo import Rloo

ALGORITHMS: dict[str, Callable[[Any], Grpo | Rloo | Reinforce | Gigpo]] = {
    "grpo": Grpo,
    "rloo": Rloo,
    "reinforce": Reinforce,
    "gigpo": Gigpo,
}


def build_algorithm(config: AlgorithmConfig) -> Grpo | Rloo | Reinforce | Gigpo:
    """The algorithm that `config` describes."""
    return ALGORITHMS[config.name](config)


__all__ = ["ALGORITHMS", "Gigpo", "Grpo", "Reinforce", "Rloo", "build_algorithm"]
