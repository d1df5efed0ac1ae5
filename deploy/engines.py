"""From a recipe to an inference engine. It holds no version yet."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.deploy.context import POLICY_ID, RunContext
from headrace.deploy.weight_offer import offered_at
from headrace.platform.config import RunConfig

if TYPE_CHECKING:
    from headrace.serving.engine import ServedEngine
    from headrace.serving.torch_engine import TorchEngine
    from headrace.serving.vllm_weights import WeightTransport


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


def build_served_engine(context: RunContext, replica: str) -> "ServedEngine":
    """The recipe's engine, for a replica."""
    config = context.config
    if config.serving.engine == "torch":
        return build_engine(config, Path(), replica)
    from headrace.serving.vllm_engine import VllmEngine

    serving, shards = config.serving, config.resources.replica.tensor_parallel
    return VllmEngine(
        replica=replica,
        policy_id=POLICY_ID,
        max_sessions=serving.max_sessions,
        max_batch=serving.max_batch,
        max_positions=max(environment.budgets.max_tokens for environment in config.environments),
        config=serving.vllm,
        threads=serving.threads,
        tensor_parallel=shards,
        control_deadline_s=serving.control_deadline_s,
        start_deadline_s=serving.start_deadline_s,
        transport=_nccl(context, shards) if serving.transport == "nccl" else None,
    )


def _nccl(context: RunContext, shards: int) -> "WeightTransport":
    from headrace.serving.vllm_nccl import NcclWeights

    address = partial(offered_at, context.root)
    return NcclWeights(address, context.door_token, shards, context.config.serving.control_deadline_s)
