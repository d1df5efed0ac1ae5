"""Ways to turn scores into gradients. `build_algorithm` knows them by name."""

from collections.abc import Callable
from typing import Any

from headrace.platform.config.algorithms import AlgorithmConfig
from headrace.trainer.algorithms.branch import Branch
from headrace.trainer.algorithms.gigpo import Gigpo
from headrace.trainer.algorithms.grpo import Grpo
from headrace.trainer.algorithms.ppo import Ppo
from headrace.trainer.algorithms.reinforce import Reinforce
from headrace.trainer.algorithms.rloo import Rloo

AnyAlgorithm = Grpo | Rloo | Reinforce | Ppo | Gigpo | Branch

ALGORITHMS: dict[str, Callable[[Any], AnyAlgorithm]] = {
    "grpo": Grpo,
    "rloo": Rloo,
    "reinforce": Reinforce,
    "ppo": Ppo,
    "gigpo": Gigpo,
    "branch": Branch,
}


def build_algorithm(config: AlgorithmConfig) -> AnyAlgorithm:
    """The algorithm that `config` describes."""
    return ALGORITHMS[config.name](config)


__all__ = ["ALGORITHMS", "AnyAlgorithm", "Branch", "Gigpo", "Grpo", "Ppo", "Reinforce", "Rloo", "build_algorithm"]
