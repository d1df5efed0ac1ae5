"""What a base and an adapter (LoRA) over it are together, for engines that run whole weights; vLLM keeps them apart.

An adapter's files hold A and B of each layer that it changes, as peft writes them; the weights are
W + (alpha / rank) * B A.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from headrace.platform.errors import EngineError
from headrace.platform.records.versions import ADAPTER_CONFIG_FILE, ADAPTER_FILE

_PREFIX = "base_model.model."
_PLAIN = {"bias": "none", "use_dora": False, "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {}}
"""What an adapter must be in every respect in which peft knows more than A and B."""


@torch.no_grad()
def add_adapter(weights: Mapping[str, Tensor], folder: str) -> None:
    """Add the adapter in `folder` to the weights of its base, by name, in place.

    Raises:
        EngineError: the folder is no adapter of plain LoRA, or not one for these weights.
    """
    try:
        config: dict[str, Any] = json.loads((Path(folder) / ADAPTER_CONFIG_FILE).read_text())
        tensors = load_file(Path(folder) / ADAPTER_FILE)
        scale = float(config["lora_alpha"]) / int(config["r"])
    except Exception as error:  # the boundary to files that anyone may have written
        raise EngineError(f"cannot read the adapter in {folder}: {type(error).__name__}: {error}") from error
    for key, plain in _PLAIN.items():
        if config.get(key, plain) not in (plain, None):
            raise EngineError(f"the adapter in {folder} has {key}={config[key]!r}; plain LoRA can be served")
    for name in sorted(tensors):
        layer, part = name.removeprefix(_PREFIX).rsplit(".lora_", 1) if ".lora_" in name else (name, "")
        weight, up = weights.get(f"{layer}.weight"), tensors.get(f"{_PREFIX}{layer}.lora_B.weight")
        if weight is None or up is None or part not in ("A.weight", "B.weight"):
            raise EngineError(f"the adapter in {folder} has {name}, for which its base has no place")
        if part == "A.weight":
            change = scale * (up.float() @ tensors[name].float())
            change = change.T if config.get("fan_in_fan_out") else change
            if change.shape != weight.shape:
                raise EngineError(f"the adapter in {folder}: {name} does not fit {tuple(weight.shape)}")
            weight.add_(change)
