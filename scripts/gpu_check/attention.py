"""Packed rows on the device, as the trainer computes them, against each sample by itself through torch's own attention.

Where the trainer has no such path on a device it pads there, and there is nothing to check.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headrace.trainer.batch import MicroBatch, pack
from headrace.trainer.devices import on_device
from headrace.trainer.forward import TokenLogprobs
from headrace.trainer.packing import PackedBatch, pack_tokens
from headrace.trainer.samples import Sample

from .report import Report
from .scale import Scale, build, episodes

LOGPROBS_LIMIT = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Mean difference of a token's logprob, in nats."""
GRADIENT_LIMIT = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Length of the gradients' difference over that of the gradient."""


def check(scale: Scale, report: Report) -> None:
    """In fp32 and in bfloat16, with prompts computed once."""
    for dtype in (torch.float32, torch.bfloat16):
        model = build(scale.trained, scale.device, seed=0)
        alone = TokenLogprobs(copy.deepcopy(model), dtype=dtype)
        packed = TokenLogprobs(model, packed=True, dtype=dtype)
        if packed.why_padded:
            report.nothing(f"not written: samples are padded on this device, as {packed.why_padded}")
            return
        name = str(dtype).removeprefix("torch.")
        report.add(**{f"attention_{name}": str(model.config._attn_implementation)})
        given = sorted(episodes(scale), key=lambda sample: sample.length)[: scale.members]
        one = _logprobs(alone, pack(given, 1), given, scale)
        other = _logprobs(packed, pack_tokens(given, scale.microbatch_tokens, True), given, scale)
        report.limit(f"logprobs_{name}", float((one - other).abs().mean()), LOGPROBS_LIMIT[dtype])
        one, other = _gradient(alone), _gradient(packed)
        report.limit(f"gradient_{name}", float((one - other).norm() / one.norm()), GRADIENT_LIMIT[dtype])


def _logprobs(
    forward: TokenLogprobs, batches: Sequence[MicroBatch | PackedBatch], order: Sequence[Sample], scale: Scale
) -> Tensor:
    """Of all loss tokens, sample by sample in `order`; their sum's gradient is left in the model."""
    found: dict[str, Tensor] = {}
    for batch in batches:
        micro: Any = on_device(batch, torch.device(scale.device))
        logprobs = forward.of(micro, micro.loss_mask).logprobs
        logprobs.sum().backward()
        own = logprobs.detach().split([row.loss_tokens for row in micro.rows])
        found |= {sample.episode_id: each for sample, each in zip(micro.rows, own, strict=True)}
    return torch.cat([found[sample.episode_id] for sample in order])


def _gradient(forward: TokenLogprobs) -> Tensor:
    model: Any = forward._model
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
