"""Which models the torch engine can run, found out before it does.

Two checks. `check_family` reads a configuration and builds the model without memory: an architecture whose cache is no
plain keys and values, or whose positions cannot be given, is refused before anything starts. `check_numbers` sends a
few tokens through slots and compares with the model's own forward pass: whatever the first check cannot know is refused
when the first version is loaded, instead of being sampled wrongly.
"""

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from headrace.platform.errors import EngineError
from headrace.platform.model_loading import MODEL_LOADING
from headrace.serving.batch import ROW
from headrace.serving.forward import ModelRunner
from headrace.serving.slot_table import SlotTable

# How far two sessions have come after each of three passes: a prefill of unequal lengths, a longer and a shorter
# observation, a decoding step.
_PASSES = ((4, 2), (6, 3), (7, 4))
_TOLERANCE = 1e-3


def needs_eager(config: Any) -> bool:
    """Attention whose scores are capped, which the fused kernels of torch leave out in silence."""
    return bool(getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None))


def check_folder(folder: str | Path, max_positions: int) -> None:
    """Refuse a model folder by its configuration alone.

    Raises:
        EngineError: the message names the architecture and what is wrong with it.
    """
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        build: Any = AutoModelForCausalLM.from_config
        with MODEL_LOADING, torch.device("meta"):
            model: nn.Module = build(config)
    except Exception as error:  # the boundary to files that anyone may have written
        raise EngineError(f"{folder}: no causal language model of transformers: {error}") from error
    check_family(model, max_positions)


def check_family(model: nn.Module, max_positions: int) -> None:
    """Refuse a model whose attention the engine cannot supply. Raises EngineError."""
    name, config = type(model).__name__, _text_config(model)
    if other := _other_layers(model, config):
        raise EngineError(f"{name} keeps {other}; the torch engine serves models that cache plain keys and values")
    taken = set(inspect.signature(model.forward).parameters)
    if lacking := sorted({"position_ids", "past_key_values", "attention_mask"} - taken):
        raise EngineError(f"{name} takes no {lacking[0]}, so requests of different lengths cannot share a batch")
    limit = getattr(config, "max_position_embeddings", None) or max_positions
    for rope in _ropes(config):
        # Past this length every key is rotated anew, also those that are cached.
        if rope.get("rope_type") in ("dynamic", "longrope"):
            limit = min(limit, rope.get("original_max_position_embeddings") or limit)
    limit = min(limit, getattr(config, "window_size", None) or limit)  # GPT-Neo keeps its local mask to itself
    if max_positions > limit:
        raise EngineError(f"max_positions={max_positions} is more than the {limit} positions of this {name}")


def check_numbers(model: nn.Module) -> None:
    """Compare two sessions that grow through slots with plain forward passes. Raises EngineError."""
    name, vocabulary = type(model).__name__, int(_text_config(model).vocab_size)
    longest = _PASSES[-1][0]
    table = SlotTable(2, longest + 1)
    table.ids[1:, :longest] = 1 + np.arange(2 * longest).reshape(2, longest) * 7 % (vocabulary - 1)
    rows = np.zeros(2, ROW)
    rows["slot"] = (1, 2)
    runner = ModelRunner(table)
    try:
        with torch.inference_mode():
            plain = [
                model(input_ids=torch.from_numpy(ids[:longest].astype(np.int64))[None], use_cache=False).logits[0]
                for ids in table.ids[1:]
            ]
        for lengths in _PASSES:
            rows["position"] = np.array(lengths) - 1
            got = torch.from_numpy(runner.logits(model, rows))
            table.cached[rows["slot"]] = lengths
            wanted = torch.stack([logits[length - 1].float() for logits, length in zip(plain, lengths, strict=True)])
            spread = float(wanted.nan_to_num().abs().max())
            if not torch.allclose(got, wanted, rtol=0.0, atol=_TOLERANCE * max(spread, 1.0), equal_nan=True):
                worst = float((got - wanted).abs().max())
                raise EngineError(f"{name} gives other logits with cached keys and values than without ({worst:.1e})")
    except EngineError:
        raise
    except Exception as error:  # foreign code that meets a cache which it may not know
        raise EngineError(f"{name} does not run with the engine's cache: {type(error).__name__}: {error}") from error


def _text_config(model: nn.Module) -> Any:
    config: Any = model.config
    return config.get_text_config(decoder=True)


def _other_layers(model: nn.Module, config: Any) -> str:
    """What the model caches besides plain keys and values; empty when there is nothing else."""
    if getattr(model, "_is_stateful", False):
        return "a recurrent state"
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"})
    try:
        made = {type(layer) for layer in DynamicCache(config=config).layers}
    except (KeyError, AttributeError):
        made = set()
        kinds = kinds or ["unknown"]
    if kinds or made - {DynamicLayer, DynamicSlidingWindowLayer}:
        return f"layers of kind {', '.join(kinds) or 'unknown'}"
    return ""


def _ropes(config: Any) -> list[dict[str, Any]]:
    """The rotary settings; some models have one for each kind of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [each for each in rope.values() if isinstance(each, dict)] or [rope]
