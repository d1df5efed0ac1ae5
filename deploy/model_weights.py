"""Whether the weights in a folder are those of the model that its config.json describes, without reading them.

The headers of safetensors files name every tensor and its shape. They are loaded by transformers itself as tensors
that take no memory, so what it renames, merges, ties or declares to be of no account is judged as when it loads the
numbers: 0.2 s for 8B parameters. What only the numbers show is found by the engine and the learner.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.platform.errors import ConfigError
from headrace.platform.model_loading import MODEL_LOADING

if TYPE_CHECKING:
    from torch import Tensor

WHOLE, SHARDS = "model.safetensors", "model.safetensors.index.json"


def check_weights_fit(folder: Path) -> None:
    """Refuse weights that do not fit their configuration, and a model that is no causal language model.

    Raises:
        ConfigError: a weight file is torn, the configuration is of an unknown kind, tensors are missing, left over or
            of another shape, or the model is not one that continues text; names the folder and some tensors.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from headrace.trainer.model import misfit

    stored = _tensors(folder)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the boundary to files that anyone may have written
        raise ConfigError(f"{folder}: config.json describes no model of transformers: {error}") from error
    known: Any = AutoModelForCausalLM._model_mapping
    if type(config) not in known:
        raise ConfigError(f"{folder}: {config.model_type} is no causal language model of transformers")
    kind = known[type(config)]
    named = getattr(config, "architectures", None) or []
    # Encoders are built as decoders without a word; what was trained to see what follows cannot continue text.
    if getattr(config, "is_decoder", True) is False and named and kind.__name__ not in named:
        raise ConfigError(f"{folder}: {config.model_type} ({', '.join(named)}) is no causal language model")
    try:
        with MODEL_LOADING, _quiet():
            _, report = kind.from_pretrained(
                None,
                config=config,
                state_dict=stored,
                dtype=torch.bfloat16,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    except Exception:  # a family that cannot be loaded so may still be loaded with its numbers, and is judged then
        return
    if fault := misfit(report):
        raise ConfigError(f"{folder}: {fault}")


def _tensors(folder: Path) -> "dict[str, Tensor]":
    """The tensors by name: every one is a single number, repeated."""
    import torch
    from safetensors import safe_open

    names = [WHOLE]
    if not (folder / WHOLE).is_file():
        names = sorted(set(json.loads((folder / SHARDS).read_text())["weight_map"].values()))
    number = torch.zeros((), dtype=torch.bfloat16)
    tensors: dict[str, Tensor] = {}
    for name in names:
        try:
            with safe_open(folder / name, framework="pt") as file:
                tensors |= {key: number.expand(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
        except Exception as error:  # the library has no type of its own for a file that it cannot read
            raise ConfigError(f"{folder / name} is torn, or no safetensors file: {error}") from error
    return tensors


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the report that transformers prints: the caller makes one sentence of it."""
    from transformers.utils import logging

    shown, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(shown)
        if bar:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
