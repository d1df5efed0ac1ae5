"""Whether a model can compute samples that lie one after the other in one row.

Owns the switch to packed attention and the proof: a trial over a few tokens, packed and each sample by itself. What
fewer tokens than the trial's cannot show (windows, rescaled rotations) is read from the configuration.

Dimensions: see packing.py.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from headrace.platform.records.arrays import i32
from headrace.trainer.devices import on_device
from headrace.trainer.flex_attention import NAME as FLEX_NAME
from headrace.trainer.flex_attention import block_mask, flex_attention
from headrace.trainer.packed_attention import NAME, packed_attention
from headrace.trainer.packing import PackedBatch, pack_tokens
from headrace.trainer.samples import Sample

TOLERANCE = 1e-4
_ROPES_BY_LENGTH = ("dynamic", "longrope")
"""Rotations that depend on the longest position of a forward pass."""


def arguments(batch: PackedBatch) -> dict[str, Any]:
    """What a model that uses packed attention is called with."""
    device = batch.token_ids.device
    # A mask that transformers takes as it is, so that it builds none of S times S.
    no_mask = torch.zeros((1, 1, 1, 1), dtype=torch.bool, device=device)
    who_sees_whom = (
        {"packed_parts": batch.parts}
        if device.type == "cpu"
        else {"packed_mask": block_mask(batch.parts, len(batch.token_ids), device)}
    )
    return {
        "input_ids": batch.token_ids[None],
        "position_ids": batch.position_ids[None],
        "attention_mask": no_mask,
        "use_cache": False,
        **who_sees_whom,
    }


def use_packed_attention(model: Any) -> str:
    """Have `model` compute packed rows, and rows as before where it is called without parts.

    Returns:
        "" where it does, else why it cannot: it is then left as it was.
    """
    config = model.config.get_text_config(decoder=True)
    before = str(config._attn_implementation)
    if why := _why_not(model, config, before):
        return why
    on_cpu = next(model.parameters()).device.type == "cpu"
    name, attention = (NAME, packed_attention) if on_cpu else (FLEX_NAME, flex_attention)
    ALL_ATTENTION_FUNCTIONS.register(name, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, sdpa_mask)
    model.set_attn_implementation(name)
    try:
        why = _difference(model, int(config.vocab_size))
    except Exception as error:  # a model's own code, called as no author of it may have thought of
        why = f"it cannot be called so ({type(error).__name__}: {error})"
    if why:
        model.set_attn_implementation(before)
    return why


def _why_not(model: Any, config: Any, attention: str) -> str:
    """What the trial would not show."""
    if (device := next(model.parameters()).device.type) not in ("cpu", "cuda"):
        return f"there is no attention for packed rows on {device!r}"
    if attention not in ("sdpa", NAME, FLEX_NAME) or not model._can_set_attn_implementation():
        return f"its attention is {attention!r}, not the fused one of torch"
    kinds = sorted({str(kind) for kind in getattr(config, "layer_types", None) or ()} - {"full_attention"})
    if kinds:
        return f"it has layers of {kinds[0]}"
    rope = getattr(config, "rope_parameters", None) or {}
    if any(name in repr(rope) for name in _ROPES_BY_LENGTH):
        return "its rotary embedding depends on the longest row"
    return ""


@torch.no_grad()
def _difference(model: Any, vocabulary: int) -> str:
    """Between packed and single samples, in the last hidden states of a few tokens."""
    tokens = [[n % vocabulary for n in ids] for ids in (range(1, 14), [*range(1, 10), 3, 2, 1], range(5, 16))]
    (batch,) = pack_tokens([_trial_sample(name, ids) for name, ids in enumerate(tokens)], 64, share_prefixes=True)
    device = next(model.parameters()).device
    batch = on_device(batch, device)
    with torch.set_grad_enabled(device.type != "cpu"):  # a kernel that is compiled there may lack its backward pass
        packed = model.base_model(**arguments(batch)).last_hidden_state[0][batch.place]
        if packed.requires_grad:
            learning = [each for each in model.base_model.parameters() if each.requires_grad]
            torch.autograd.grad(packed.sum(), learning, allow_unused=True)
    apart = [
        model.base_model(input_ids=torch.from_numpy(row.token_ids.astype(np.int64)).to(device)[None], use_cache=False)
        for row in batch.rows
    ]
    single = torch.cat([each.last_hidden_state[0] for each in apart])
    worst = float((packed - single).abs().max() / single.abs().max())
    return "" if worst <= TOLERANCE else f"packed samples come out otherwise than single ones (by {worst:.1e})"


def _trial_sample(number: int, token_ids: Sequence[int]) -> Sample:
    length = len(token_ids)
    return Sample(
        episode_id=str(number),
        agent_id="",
        segment=0,
        lag=0,
        token_ids=i32(token_ids),
        action_mask=np.ones(length, np.uint8),
        loss_mask=np.ones(length, np.uint8),
        behaviour_logprobs=np.zeros(length, np.float32),
        advantages=np.zeros(length, np.float32),
        temperatures=np.ones(length, np.float32),
    )
