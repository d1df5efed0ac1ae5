"""Ways to turn scores into gradients. `build_algorithm` knows them by name."""

from headrace.platform.config.learner import GrpoConfig
from headrace.trainer.algorithms.grpo import Grpo

ALGORITHMS = {"grpo": Grpo}


def build_algorithm(config: GrpoConfig) -> Grpo:
    """The algorithm that `config` describes."""
    return ALGORITHMS[config.name](config)


__all__ = ["ALGORITHMS", "Grpo", "build_algorithm"]
