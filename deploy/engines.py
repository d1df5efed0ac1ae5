"""From a recipe to an inference engine. It holds no version yet."""

from pathlib import Path
from typing import TYPE_CHECKING

from headrace.deploy.context import POLICY_ID
from headrace.platform.config import RunConfig

if TYPE_CHECKING:
    from headrace.serving.engine import ServedEngine
    from headrace.serving.torch_engine import TorchEngine


def build_engine(config: RunConfig, model_dir: Path, replica: str, *, inline: bool = False) -> "TorchEngine":
    """A torch engine for models of the shape of `model_dir`; it holds no version yet."""
    from headrace.serving.torch_engine import TorchEngine

    longest = max(environment.budgets.max_tokens for environment in config.environments)
    return TorchEngine(
        replica=replica,
        max_sessions=config.serving.max_sessions,
        max_batch=config.serving.max_batch,
        max_positions=longest,
        policy_id=POLICY_ID,
        threads=config.serving.threads,
        inline=inline,
    )


def build_served_engine(config: RunConfig, replica: str) -> "ServedEngine":
    """The recipe's engine, for a replica; it holds no version yet."""
    if config.serving.engine == "torch":
        return build_engine(config, Path(), replica)
    from headrace.serving.vllm_engine import VllmEngine

    serving = config.serving
    return VllmEngine(
        replica=replica,
        policy_id=POLICY_ID,
        max_sessions=serving.max_sessions,
        max_batch=serving.max_batch,
        max_positions=max(environment.budgets.max_tokens for environment in config.environments),
        config=serving.vllm,
        threads=serving.threads,
        tensor_parallel=config.resources.replica.tensor_parallel,
        control_deadline_s=serving.control_deadline_s,
        start_deadline_s=serving.start_deadline_s,
    )
