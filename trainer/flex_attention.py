"""Attention over packed samples on a GPU: torch's flex attention, with a mask made from the parts.

Each token of a row sees a span that ends with itself and, where its sample shares a prompt with others, the span of
that prompt. Blocks of the mask that nobody sees are not computed, so there is no padding here either. The kernel is
compiled at the first call; torch has no backward pass of it for CPUs. It was not run on a GPU (docs/not-run.md): the
trial of `packing_support.py` decides there, forwards and backwards.

Dimensions: S tokens in the row, H heads, W width of a head.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from headrace.trainer.packed_attention import UNKNOWN_OPTIONS, Part

NAME = "headrace_flex"
"""Among transformers' attention implementations."""

I64 = npt.NDArray[np.int64]


def flex_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    packed_mask: BlockMask | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention [1, S, H, W] under `packed_mask`; without one the model runs as transformers would run it.

    Args:
        module: the layer's attention.
        query: [1, H, S, W]; key and value the same, with as many heads or a divisor of them.
        attention_mask: looked at only where there is no `packed_mask`.
        packed_mask: of `block_mask`.
        options: what else transformers' own function is told.

    Raises:
        ValueError: the layer asks for more than plain attention.
    """
    if packed_mask is None:
        plain: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return plain
    if asked := [name for name in UNKNOWN_OPTIONS if options.get(name) is not None]:
        raise ValueError(f"packed attention knows no {asked[0]}")
    if torch.is_autocast_enabled(query.device.type):  # rotated in fp32, while values are not
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    found, _ = flex_attention_forward(module, query, key, value, packed_mask, scaling=options.get("scaling"))
    return found, None


def block_mask(parts: Sequence[Part], length: int, device: torch.device) -> BlockMask:
    """Who sees whom by `parts`, for a row of `length` tokens. Takes S times S bytes while it is made."""
    own, first, last = (torch.from_numpy(each).to(device) for each in spans(parts, length))

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return ((key <= query) & (key >= own[query])) | ((key >= first[query]) & (key < last[query]))

    return create_block_mask(sees, B=None, H=None, Q_LEN=length, KV_LEN=length, device=device)


def spans(parts: Sequence[Part], length: int) -> tuple[I64, I64, I64]:
    """Of each token i64[S] of: the first that it sees of those that end with itself, and the bounds [first, last) of
    those that it sees besides.

    Whole parts that end where a token's own span begins only make that longer: they are halves of a causal one, or the
    prompt in front of its first continuation.
    """
    own = np.arange(length)
    first, last = np.zeros(length, np.int64), np.zeros(length, np.int64)
    for part in parts:
        queries = slice(part.first, part.last)
        if part.causal:
            own[queries] = part.key_first
            continue
        joins = own[queries] == part.key_last
        own[queries] = np.where(joins, part.key_first, own[queries])
        first[queries] = np.where(joins, first[queries], part.key_first)
        last[queries] = np.where(joins, last[queries], part.key_last)
    return own, first, last
