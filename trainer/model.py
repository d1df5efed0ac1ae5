"""Small models from random weights, and model folders.

Embeddings and linear layers are drawn from N(0, 1/sqrt(width of their input)), the layers that write into the residual
stream from half of that. Whether a small model learns to copy depends on the draw: with the usual N(0, 0.02) for
embeddings two seeds in ten never did on the lookup task, with this one none of nine.
The draw depends on the seed alone and leaves the process's random state as it was.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from headrace.platform.config.model import TinyLlamaConfig
from headrace.platform.errors import ConfigError
from headrace.platform.model_loading import MODEL_LOADING
from headrace.trainer.weights import WEIGHT_FILE, constant_files, weight_file

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

_RESIDUAL_WRITERS = ("o_proj.weight", "down_proj.weight")
# How many tensors a message names.
_NAMED = 3


def build_tiny_llama(
    config: TinyLlamaConfig, vocab_size: int, seed: int, pad_token_id: int, eos_token_id: int
) -> "LlamaForCausalLM":
    """A Llama with tied embeddings in fp32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    make: Any = LlamaForCausalLM
    shape = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=config.hidden,
        intermediate_size=config.intermediate,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        max_position_embeddings=config.max_positions,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        pad_token_id=pad_token_id,
        bos_token_id=None,
        eos_token_id=eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        model = make(shape).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, _std(name, parameter.shape[1]), generator=generator)
    model.eval()
    return cast("LlamaForCausalLM", model)


def load_folder(folder: str | Path) -> Any:
    """The causal language model of a Hugging Face folder, in fp32 and evaluation mode. Touches no network.

    Attention whose scores are capped (Gemma 2) is computed step by step: the fused kernels of torch leave the cap out.

    Raises:
        ConfigError: the folder cannot be read, or its weights are not those of the model that its config.json
            describes.
    """
    from transformers import AutoModelForCausalLM

    make: Any = AutoModelForCausalLM.from_pretrained
    try:
        with MODEL_LOADING:
            model, report = make(
                folder,
                dtype=torch.float32,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are reported, and refused below
            )
    except Exception as error:  # the boundary to files that anyone may have written
        raise ConfigError(f"cannot load the model in {folder}: {type(error).__name__}: {error}") from error
    if fault := misfit(report):
        raise ConfigError(f"{folder}: {fault}")
    model.eval()
    if getattr(model.config.get_text_config(decoder=True), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")
    return model


def misfit(report: Mapping[str, Iterable[Any]]) -> str:
    """Why weights are not those of a model, by what transformers reports of loading them; empty where they are.

    It fills what a file lacks with random numbers, and passes over what the model has no place for. Tied weights, and
    what a family declares to be of no account, are not reported.
    """
    lacking, surplus = (sorted(map(str, report.get(key) or ())) for key in ("missing_keys", "unexpected_keys"))
    if report.get("mismatched_keys"):
        name, stored, wanted = min(report["mismatched_keys"], key=lambda each: str(each[0]))
        return f"the weights do not fit config.json: {name} is {tuple(stored)}, not {tuple(wanted)}"
    if lacking:
        also = f"; they hold {_some(surplus)} instead" if surplus else ""
        return f"the weights do not fit config.json: they lack {_some(lacking)}{also}"
    return f"the weights do not fit config.json, which has no place for {_some(surplus)}" if surplus else ""


def save_folder(model: torch.nn.Module, folder: str | Path, tokenizer: Mapping[str, bytes]) -> None:
    """Write a Hugging Face folder: configuration, weights and the given tokenizer files by name."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    for name, data in {**constant_files(model, tokenizer), WEIGHT_FILE: weight_file(model)}.items():
        (path / name).write_bytes(data)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _std(name: str, fan_in: int) -> float:
    return (0.5 if name.endswith(_RESIDUAL_WRITERS) else 1.0) / math.sqrt(fan_in)
