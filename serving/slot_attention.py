"""Attention over slots: the fused attention of torch, for rows of similar length at a time.

Rows of a batch differ in length. Looking at the longest one's length for all of them, in one go, would compute mostly
padding, and on memory that no cache holds. So the rows come sorted, and each part of them is gathered to its own length
and attended to before the next. Owns the function that transformers calls in each layer, and who can use it; what a
part is, and where its keys and values lie, is `kv_slots.py`'s.
"""

# B rows, T new tokens a row, L positions looked at, H heads, W width of a head, S slots, P positions of a slot

import inspect
from typing import Any

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from headrace.serving.kv_slots import Step

NAME = "headrace_slots"
"""Among transformers' attention implementations."""


def slot_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    slot_step: Step | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention [B, T, H, W] of the rows of `slot_step`.

    Args:
        module: the layer's attention.
        query: [B, H, T, W].
        key: of all slots, [S, P, H, W].
        value: of all slots, [S, P, H, W].
        attention_mask: bool [B, 1, T, L].
        slot_step: which rows are in which slots. Without it the model runs without slots, as transformers would run it.
        options: what else transformers' own function is told.
    """
    if slot_step is None:
        plain: tuple[torch.Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return plain
    results = []
    for part in slot_step.parts:
        keys, values = slot_step.gather(key, 0, part), slot_step.gather(value, 1, part)
        mask = attention_mask[part.rows, ..., : part.length]
        results.append(sdpa_attention_forward(module, query[part.rows], keys, values, mask, **options)[0])
    return torch.cat(results) if len(results) > 1 else results[0], None


def use_slot_attention(model: Any) -> bool:
    """Have `model` call it; False where that cannot work: other attention than the fused one, or a model that hands
    nothing on to its layers. That it works, `check_numbers` has to say."""
    takes_more = any(each.kind is each.VAR_KEYWORD for each in inspect.signature(model.forward).parameters.values())
    if attention_of(model) != "sdpa" or not takes_more or not model._can_set_attn_implementation():
        return False
    ALL_ATTENTION_FUNCTIONS.register(NAME, slot_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    return True


def attention_of(model: Any) -> str:
    """The name of the attention that a causal language model uses."""
    return str(model.config.get_text_config(decoder=True)._attn_implementation)
