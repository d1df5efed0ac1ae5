"""Where the learner computes: the device that the configuration names, and batches brought to it."""

from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from headrace.platform.errors import ConfigError
from headrace.trainer.batch import MicroBatch
from headrace.trainer.packing import PackedBatch

Micro = TypeVar("Micro", MicroBatch, PackedBatch, MicroBatch | PackedBatch)


def learner_device(wanted: str) -> torch.device:
    """What `learner.device` stands for here: `auto` is the first GPU that this process may use, else the CPU.

    Raises:
        ConfigError: a GPU is wanted, and there is none, or torch was not built for it.
    """
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"learner.device=cuda needs a GPU and torch built for CUDA (this is torch {torch.__version__}); set"
            " resources.learner.gpus=1 where Ray places the learner, or learner.device=cpu"
        )
    return torch.device(wanted)


def on_device(micro: Micro, device: torch.device) -> Micro:
    """A microbatch whose tensors are on `device`; the same one where they are."""
    if micro.token_ids.device.type == device.type:
        return micro
    tensors = {each.name: getattr(micro, each.name) for each in fields(micro)}
    moved: dict[str, Any] = {name: each.to(device) for name, each in tensors.items() if isinstance(each, Tensor)}
    return replace(micro, **moved)
