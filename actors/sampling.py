"""From a recipe's sampling to what an engine is asked for."""

from headrace.platform.config.environments import EnvironmentConfig
from headrace.platform.contracts import Renderer
from headrace.platform.records.generation import SamplingParams


def sampling_params(config: EnvironmentConfig, renderer: Renderer) -> SamplingParams:
    """The record form of a recipe's sampling, with the renderer's stop tokens."""
    sampling = config.sampling
    return SamplingParams(
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop_token_ids=renderer.stop_token_ids,
    )
