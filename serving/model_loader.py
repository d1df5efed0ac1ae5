"""From a Hugging Face folder to a model that the engine can run.

Owns what is accepted: all versions of an engine have one architecture, every tensor comes from the file, no
tensor of the file is left over, and the model is one whose cache and mask the engine can supply. Whatever is wrong is
an EngineError that names the folder (case S4).
"""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from headrace.platform.errors import EngineError
from headrace.platform.model_loading import MODEL_LOADING
from headrace.serving.adapters import add_adapter
from headrace.serving.slot_attention import use_slot_attention
from headrace.serving.support import check_family, check_numbers, needs_eager

_NOT_ARCHITECTURE = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")


class ModelLoader:
    """Loads the versions of one engine.

    Args:
        max_positions: the longest context that the engine will ask for, in tokens.
    """

    def __init__(self, max_positions: int) -> None:
        self._max_positions = max_positions
        self._architecture: dict[str, Any] | None = None

    def load(self, path: str, sibling: nn.Module | None) -> nn.Module:
        """The model in the folder `path`, fp32, for inference.

        Args:
            path: a folder with config.json and safetensors.
            sibling: a model of the same engine; where there is one, only the weights are read, which is many times
                faster than building a model.

        Raises:
            EngineError: the folder is not readable, of another architecture, or of a kind that is not supported.
        """
        try:
            config = json.loads((Path(path) / "config.json").read_text())
            architecture = {key: value for key, value in config.items() if key not in _NOT_ARCHITECTURE}
            if self._architecture not in (None, architecture):
                raise EngineError(f"{path} has another architecture than the versions that this engine holds")
            model = _copy_with_weights(sibling, Path(path) / "model.safetensors") if sibling is not None else None
            if model is None:
                model = _from_pretrained(path)
                check_family(model, self._max_positions)
                check_attention(model)
        except EngineError:
            raise
        except Exception as error:  # the boundary to files that anyone may have written
            raise EngineError(f"cannot load the model in {path}: {type(error).__name__}: {error}") from error
        self._architecture = architecture
        return model.eval().requires_grad_(False)

    def load_adapter(self, path: str, base: nn.Module) -> nn.Module:
        """A copy of `base` with the adapter in the folder `path` added to its weights.

        Raises:
            EngineError: the folder is no adapter, or none for these weights.
        """
        model = copy.deepcopy(base)
        add_adapter(dict(model.named_parameters()), path)
        return model


def check_attention(model: Any) -> None:
    """`check_numbers`, with the attention that is faster where the model gives the right numbers with it."""
    if use_slot_attention(model):
        try:
            check_numbers(model)
        except EngineError:
            model.set_attn_implementation("sdpa")
        else:
            return
    check_numbers(model)


def _from_pretrained(path: str) -> nn.Module:
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with MODEL_LOADING:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=torch.float32,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    model: nn.Module = loaded[0]
    report: dict[str, Any] = loaded[1]
    # transformers fills what a file lacks with random numbers, passes over what is too much, and only warns.
    for fault in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if report.get(fault):
            raise EngineError(f"{path} has {fault.replace('_', ' ')}: {sorted(map(str, report[fault]))[:5]}")
    if needs_eager(model.config):
        loaded[0].set_attn_implementation("eager")
    return model.eval()


def _copy_with_weights(sibling: nn.Module, file: Path) -> nn.Module | None:
    """A copy of `sibling` with the tensors of `file`; None where their names differ from the model's own, as in
    sharded folders and old formats, which transformers knows how to read."""
    if not file.is_file():
        return None
    stored = set(sibling.state_dict())
    model = copy.deepcopy(sibling)
    own = {name: tensor for name, tensor in [*model.named_parameters(), *model.named_buffers()] if name in stored}
    with safe_open(file, framework="pt") as tensors, torch.no_grad():
        if set(tensors.keys()) != set(own):
            return None
        for name, tensor in own.items():
            loaded = tensors.get_tensor(name)
            if loaded.shape != tensor.shape:
                raise EngineError(f"{file}: {name} is {tuple(loaded.shape)}, not {tuple(tensor.shape)}")
            tensor.copy_(loaded)
    return model
