"""The learner's step: tokens a second, and how near it comes to the device's limit for matrix products.

Operations are counted as executed: matrix products and attention, backward twice forward, recomputation and elementwise
work not. The limit is the fastest of the scale's products in the type that the decoder computes in.
"""

import statistics
import time

import torch

from headrace.platform.config import GrpoConfig, LearnerConfig
from headrace.trainer.algorithms import Grpo
from headrace.trainer.backends.torch import TorchBackend
from headrace.trainer.batch import MicroBatch
from headrace.trainer.packing import PackedBatch

from .report import Report
from .scale import Scale, Shape, build, episodes

_REPEATS = 3


def check(scale: Scale, report: Report) -> None:
    """GRPO with AdamW, in fp32 and in bfloat16."""
    given = episodes(scale)
    tokens = sum(sample.length for sample in given)
    report.add(episodes=len(given), tokens=tokens, loss_tokens=sum(sample.loss_tokens for sample in given))
    for dtype in ("float32", "bfloat16"):
        config = LearnerConfig(device=scale.device, dtype=dtype, microbatch_tokens=scale.microbatch_tokens)
        backend = TorchBackend(build(scale.trained, scale.device, seed=0), config)
        report.add(padded=backend.why_padded or "no")
        _reset_memory(scale)
        took = []
        for repeat in range(_REPEATS + 1):
            began = _now(scale)
            figures = backend.step(given, Grpo(GrpoConfig()))
            if repeat:
                took.append(_now(scale) - began)
        seconds, limit = statistics.median(took), peak(scale, getattr(torch, dtype))
        does = sum(operations(scale.trained, batch) for batch in backend._microbatches(given))
        report.add(
            **{
                f"step_s_{dtype}": seconds,
                f"tokens_per_s_{dtype}": tokens / seconds,
                f"peak_tflop_per_s_{dtype}": limit / 1e12,
                f"fraction_of_peak_{dtype}": does / seconds / limit,
                f"loss_{dtype}": figures["loss"],
            }
        )
        if scale.device == "cuda":
            report.add(**{f"memory_gb_{dtype}": torch.cuda.max_memory_allocated() / 1e9})


def operations(shape: Shape, batch: MicroBatch | PackedBatch) -> float:
    """What a step computes for one microbatch; of a causal square its half."""
    if isinstance(batch, MicroBatch):
        rows, length = batch.token_ids.shape[0], batch.token_ids.shape[1] - 1
        computed, pairs = rows * length, rows * length**2 / 2
    else:
        computed, pairs = len(batch.token_ids), seen(batch)
    layer = 2 * computed * (4 * shape.width**2 + 3 * shape.width * shape.inner) + 4 * shape.width * pairs
    chosen = int(batch.loss_mask.sum())
    return 3.0 * (shape.layers * layer + 2 * chosen * shape.width * shape.vocabulary)


def seen(batch: PackedBatch) -> float:
    """Pairs of tokens of which one sees the other."""
    return sum((p.last - p.first) * (p.key_last - p.key_first) * (0.5 if p.causal else 1.0) for p in batch.parts)


def peak(scale: Scale, dtype: torch.dtype) -> float:
    """Operations a second of the fastest of the products."""
    best = 0.0
    for rows, inner, columns in scale.peak_shapes:
        one = torch.randn(rows, inner, device=scale.device, dtype=dtype)
        other = torch.randn(inner, columns, device=scale.device, dtype=dtype)
        torch.mm(one, other)
        for _ in range(_REPEATS):
            began = _now(scale)
            torch.mm(one, other)
            best = max(best, 2.0 * rows * inner * columns / (_now(scale) - began))
    return best


def _now(scale: Scale) -> float:
    """Seconds, when all that was asked of the device is done."""
    if scale.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _reset_memory(scale: Scale) -> None:
    if scale.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
