"""What a recipe whose groups branch cannot have (docs/branch.md), said before anything starts."""

from headrace.actors.harness.environment import HARNESS
from headrace.platform.config import RunConfig
from headrace.platform.config.algorithm import AlgorithmOptions
from headrace.platform.config.branch import BranchConfig
from headrace.platform.errors import ConfigError
from headrace.platform.records.status import UpdateMode


def check_branch(config: RunConfig) -> None:
    """Refuse worlds that cannot come to the same state again, and episodes that more than one version samples.

    Raises:
        ConfigError: for an algorithm that branches, with one of these.
    """
    algorithm: AlgorithmOptions = config.learner.algorithm
    if not isinstance(algorithm, BranchConfig):
        return
    if config.rollout.update_mode is not UpdateMode.STICKY:
        raise ConfigError(
            f"learner.algorithm.name=branch compares what one version makes of a state, and rollout.update_mode="
            f"{config.rollout.update_mode} lets it change within an episode; set rollout.update_mode=sticky"
        )
    for environment in config.environments:
        told = f"environments.{environment.known_as}"
        if environment.name == HARNESS:
            raise ConfigError(
                f"{told}: learner.algorithm.name=branch begins episodes in the middle of others, which an agent of your"
                " own cannot; choose another algorithm, such as grpo"
            )
        if environment.faults:
            raise ConfigError(
                f"{told}.faults: learner.algorithm.name=branch compares episodes that go on from one state in the same"
                " world, and faults would strike some of them; leave the faults out, or choose another algorithm"
            )
