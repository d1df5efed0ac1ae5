"""Low-rank adapters of a model: W + (alpha / rank) * B A, where A and B alone are trained (Hu et al. 2021,
arXiv:2106.09685).

peft puts them into the model's linear layers, in place, so that everything else sees the model that it always was. B
begins at zero, A is drawn from a seed of its own: the first weights are the base's, and the same in each run. Owns
which layers, the files in peft's format, and the switch that shows the base beneath. Which version is the base is the
publisher's business.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors.torch import load
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from headrace.platform.config.learner import LoraConfig
from headrace.platform.contracts import LearnerBackend
from headrace.platform.errors import ConfigError
from headrace.platform.records.versions import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from headrace.trainer.weights import serialised

_NAME = "default"
_PREFIX = "base_model.model."
"""What peft puts before the names of a model's own modules in files."""
_BASE = ".base_layer."
_SEED = 0


class Adapters:
    """Puts adapters into `model`, whose own weights are frozen from then on.

    Raises:
        ConfigError: peft is not installed, or `config.targets` names a layer that the model does not have.
    """

    def __init__(self, model: Any, config: LoraConfig) -> None:
        try:
            from peft import LoraConfig as PeftConfig
            from peft import inject_adapter_in_model
            from peft.tuners.lora import LoraLayer
        except ImportError:
            raise ConfigError("learner.lora needs peft: pip install 'headrace[lora]'") from None
        settings: Any = PeftConfig(
            r=config.rank,
            lora_alpha=config.alpha,
            target_modules=_targets(model, config.targets),
            fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
            task_type="CAUSAL_LM",
        )
        model.requires_grad_(False)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            inject_adapter_in_model(settings, model, _NAME)
        self._model = model
        self._layers: dict[str, Any] = {
            name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)
        }
        written = {**settings.to_dict(), "inference_mode": True}
        self._config = json.dumps(
            {key: sorted(value) if isinstance(value, set) else value for key, value in written.items()},
            indent=2,
            sort_keys=True,
        ).encode()

    def files(self) -> dict[str, bytes]:
        """The adapters as peft writes them."""
        tensors = {_PREFIX + name: tensor.detach().cpu().contiguous() for name, tensor in self._tensors().items()}
        return {ADAPTER_CONFIG_FILE: self._config, ADAPTER_FILE: serialised(tensors)}

    def take_up(self, files: Mapping[str, bytes]) -> None:
        """Copy what `files` returned into the adapters, in place.

        Raises:
            ValueError: they are those of another model, or of another rank.
            KeyError: the file is missing.
        """
        stored = {name.removeprefix(_PREFIX): tensor for name, tensor in load(files[ADAPTER_FILE]).items()}
        own = self._tensors()
        if shapes(stored) != shapes(own):
            different = sorted(set(shapes(stored).items()) ^ set(shapes(own).items()))
            raise ValueError(f"the adapters are those of another model or rank: {different[0][0]} differs")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(stored[name])

    def base(self) -> dict[str, Tensor]:
        """The tensors of the model as it was, under the names that it had."""
        return {
            name.replace(_BASE, "."): tensor
            for name, tensor in self._model.state_dict().items()
            if ".lora_" not in name
        }

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """In here the model is the base. Not around a forward pass that will be asked for gradients."""
        for layer in self._layers.values():
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.enable_adapters(True)

    def _tensors(self) -> dict[str, Tensor]:
        """By name in the model: A [rank, in] and B [out, rank] of each layer."""
        return {
            f"{name}.{part}.weight": getattr(layer, part)[_NAME].weight
            for name, layer in self._layers.items()
            for part in ("lora_A", "lora_B")
        }


@runtime_checkable
class OverBase(Protocol):
    """A backend whose weights may be adapters."""

    def base(self) -> Mapping[str, bytes]:
        """The files of the model that `weights` are adapters over; none where they are whole themselves."""


def first_files(backend: LearnerBackend) -> Mapping[str, bytes]:
    """The files of a run's first version: whole weights, which later ones may be adapters over."""
    base = backend.base() if isinstance(backend, OverBase) else {}
    return base or backend.weights()


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Of each tensor."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _targets(model: Any, wanted: Sequence[str]) -> list[str]:
    """The last names of the layers that get adapters: `wanted`, or all linear ones but the output layer, whose weights
    are often the embedding's too."""
    output = model.get_output_embeddings()
    known = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not output
    }
    if unknown := sorted(set(wanted) - known):
        raise ConfigError(
            f"learner.lora.targets: {type(model).__name__} has no linear layer {unknown[0]!r} below its output layer;"
            f" it has {', '.join(sorted(known))}"
        )
    return sorted(wanted or known)
