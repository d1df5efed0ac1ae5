"""Gradient checkpointing: what a layer computes inside is thrown away, and computed once more for the gradient.

Memory per token is then that of one hidden state a layer, at the price of a second forward pass (Chen et al. 2016,
arXiv:1604.06174). Transformers' own switch works in training mode alone, and here models stay in evaluation mode
(`forward.py`); so the layers that transformers marks as fit for it are wrapped here. The second pass draws no random
numbers, so losses are the same to the last digit, and gradients too where the kernels are deterministic.
"""

from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from headrace.platform.errors import ConfigError


def recompute_layers(model: nn.Module) -> int:
    """Have every layer of `model` compute twice; returns how many there are. Call it once, on the model that learns.

    Raises:
        ConfigError: no layer of this model can.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"learner.gradient_checkpointing: {type(model).__name__} has no layer that transformers can checkpoint; set"
            " it to false, and learner.microbatch_tokens lower where memory is short"
        )
    for layer in layers:
        again: Any = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        layer.forward = again
    return len(layers)
