"""One optimizer step by DeepSpeed, ZeRO stage 2 with a single rank over NCCL, against the torch backend's."""

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load
from torch import Tensor

from headrace.platform.config import GrpoConfig, LearnerConfig
from headrace.platform.config.deepspeed import DeepspeedConfig
from headrace.trainer.algorithms import Grpo
from headrace.trainer.weights import WEIGHT_FILE

from .report import Report
from .scale import Scale, build, episodes, saved

STEP_LIMIT = 1e-4
"""Relative difference of the loss, and of the gradient's norm."""
UPDATE_LIMIT = 0.02
"""Length of the difference of the two changes of the weights over that of one: where a gradient is next to nothing,
rounding chooses the sign of Adam's first change."""
_STAGE, _HOST, _PATIENCE_S = 2, "127.0.0.1", 60.0


def check(scale: Scale, report: Report) -> None:
    """The same weights and episodes for both."""
    from headrace.trainer.backends.deepspeed import DeepspeedRank
    from headrace.trainer.backends.deepspeed_engine import join
    from headrace.trainer.backends.torch import TorchBackend
    from headrace.trainer.ranks import meeting_place

    given, algorithm = episodes(scale)[: 2 * scale.members], Grpo(GrpoConfig())
    options = {"microbatch_tokens": scale.microbatch_tokens, "device": scale.device}
    sharded = LearnerConfig(backend="deepspeed", deepspeed=DeepspeedConfig(stage=_STAGE), **options)
    with tempfile.TemporaryDirectory(prefix="headrace-gpu-check-") as root:
        folder = saved(build(scale.trained, scale.device, seed=0), Path(root) / "model")
        before = load((folder / WEIGHT_FILE).read_bytes())
        backend = TorchBackend(folder, LearnerConfig(**options))
        began = time.monotonic()
        expected = backend.step(given, algorithm)
        report.add(torch_step_s=time.monotonic() - began)
        wanted = load(backend.weights()[WEIGHT_FILE])
        del backend
        began = time.monotonic()
        store = meeting_place(_HOST, 1, _PATIENCE_S)
        join(0, sharded, _HOST, store.port, store)
        rank = DeepspeedRank(folder, sharded, 0)
        report.add(stage=_STAGE, ranks=1, group=dist.get_backend(), start_s=time.monotonic() - began)
        try:
            began = time.monotonic()
            done = rank.step(given, algorithm)
            report.add(zero_step_s=time.monotonic() - began)
            found = load(rank.weights()[WEIGHT_FILE])
        finally:
            rank.close()
            dist.destroy_process_group()
    got = done.statistics.build(done.grad_norm, done.lr)
    for name in ("loss", "grad_norm"):
        report.limit(name, abs(got[name] - expected[name]) / abs(expected[name]), STEP_LIMIT)
    report.limit("update", float(_apart(before, wanted, found)), UPDATE_LIMIT)


def _apart(before: Mapping[str, Tensor], one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Tensor:
    """How far apart two changes of the weights are, relative to the first."""
    changes = torch.cat([(one[name] - before[name]).flatten() for name in before])
    return torch.cat([(one[name] - other[name]).flatten() for name in before]).norm() / changes.norm()
