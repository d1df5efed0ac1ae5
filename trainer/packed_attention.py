"""Attention over samples that lie one after the other in one row, each seeing itself and the prompt that it shares.

Who sees whom is a list of parts: queries of a span over keys of a span, causally or wholly. Each sample is a causal
part of its own; all continuations of a shared prompt are, together, the queries of one more part over the prompt's
keys. Parts over the same queries are merged by their log-sum-exp, and each part's share of the gradient follows from
the merged one, as in ring attention (Liu et al. 2023, arXiv:2310.01889). So nothing is computed for pairs that do not
see each other: no padding, and no masked half.

Owns the function that transformers calls in each layer on a CPU and the parts. Which samples share what is
`packing.py`'s; which model may use it is `packing_support.py`'s.

Dimensions: S tokens in the row, H heads, W width of a head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

NAME = "headrace_packed"
"""Among transformers' attention implementations."""

UNKNOWN_OPTIONS = ("sliding_window", "softcap", "s_aux", "position_bias")
"""What a layer may ask for besides plain attention, and does not get here."""

LEAF = 128
"""A causal part of so many tokens is not worth halving."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, slots=True)
class Part:
    """Queries `[first, last)` see keys `[key_first, key_last)`: all of them, or, where `causal`, those up to
    themselves; the two spans are then the same."""

    first: int
    last: int
    key_first: int
    key_last: int
    causal: bool


def causal_parts(first: int, last: int) -> tuple[list[Part], list[Part]]:
    """A causal span as small causal parts along the diagonal and whole ones below it.

    The fused kernel's backward pass computes a causal part as a square; in halves, only the small ones are.
    """
    if last - first <= LEAF:
        return [Part(first, last, first, last, causal=True)], []
    middle = (first + last) // 2
    upper, lower = causal_parts(first, middle), causal_parts(middle, last)
    below = Part(middle, last, first, middle, causal=False)
    return [*upper[0], *lower[0]], [*upper[1], *lower[1], below]


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    packed_parts: Sequence[Part] | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention [1, S, H, W] by `packed_parts`.

    Args:
        module: the layer's attention.
        query: [1, H, S, W]; key and value the same, with as many heads or a divisor of them.
        attention_mask: looked at only where there are no parts.
        packed_parts: causal parts that together have every token once as a query, then whole ones. Without them the
            model runs as transformers would run it.
        options: what else transformers' own function is told.

    Raises:
        ValueError: the layer asks for more than plain attention.
    """
    if packed_parts is None:
        plain: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return plain
    if asked := [name for name in UNKNOWN_OPTIONS if options.get(name) is not None]:
        raise ValueError(f"packed attention knows no {asked[0]}")
    repeats = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, repeats), repeat_kv(value, repeats)
    if torch.is_autocast_enabled("cpu"):  # the kernel is none of those that autocast knows
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    result: Tensor = _Merged.apply(  # type: ignore[no-untyped-call]
        query, key, value, packed_parts, options.get("scaling")
    )
    return result.transpose(1, 2), None


class _Merged(torch.autograd.Function):
    """See the module; tensors [1, H, S, W], in memory as [1, S, H, W]."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, parts: Sequence[Part], scale: float | None
    ) -> Tensor:
        out = _like(query)
        sums = torch.promote_types(query.dtype, torch.float32)
        total = query.new_empty(query.shape[0], query.shape[2], query.shape[1], dtype=sums).transpose(1, 2)
        for part in parts:
            own = slice(part.first, part.last)
            keys, values = (each[:, :, part.key_first : part.key_last] for each in (key, value))
            found, weight = _flash(query[:, :, own], keys, values, 0.0, part.causal, scale=scale)
            if part.causal:
                out[:, :, own], total[:, :, own] = found, weight
            else:
                _merge(out[:, :, own], total[:, :, own], found, weight)
        ctx.save_for_backward(query, key, value, out, total)
        ctx.parts, ctx.scale = parts, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, total = ctx.saved_tensors
        of_query, of_key, of_value = _like(query), _like(key), _like(value)
        for part in ctx.parts:
            own, seen = slice(part.first, part.last), slice(part.key_first, part.key_last)
            found = _flash_backward(
                gradients[0][:, :, own],
                query[:, :, own],
                key[:, :, seen],
                value[:, :, seen],
                out[:, :, own],
                total[:, :, own],
                0.0,
                part.causal,
                scale=ctx.scale,
            )
            for whole, span, share in zip((of_query, of_key, of_value), (own, seen, seen), found, strict=True):
                if part.causal:
                    whole[:, :, span] = share
                else:
                    whole[:, :, span] += share
        return of_query, of_key, of_value, None, None


def _merge(out: Tensor, total: Tensor, found: Tensor, weight: Tensor) -> None:
    """Take further keys into `out` in place: `total` and `weight` are log-sum-exps [1, H, T] of what they saw."""
    both = torch.logaddexp(total, weight)
    out.mul_(torch.exp(total - both)[..., None]).addcmul_(found, torch.exp(weight - both)[..., None])
    total.copy_(both)


def _like(tensor: Tensor) -> Tensor:
    """Room for [1, H, S, W], in memory as [1, S, H, W]."""
    one, heads, length, width = tensor.shape
    return tensor.new_empty(one, length, heads, width).transpose(1, 2)
