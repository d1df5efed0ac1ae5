"""New weights from a learner into a running vLLM: as files, and over NCCL where there are two GPUs.

The learner is this process, vLLM has processes of its own. NCCL refuses two ranks on one GPU, so one GPU allows the
files alone, and of the other way what the learner does before it sends: taking the tensors up to its device.
"""

import asyncio
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from headrace.serving.vllm_engine import VllmEngine
from headrace.serving.vllm_nccl import NcclSender, NcclWeights
from headrace.serving.weight_link import WeightOffer
from headrace.trainer.weights import WEIGHT_FILE, constant_files, weight_file

from .engines import differences, engine, gap_limit, generate, requests
from .report import Report
from .scale import POLICY, Scale, build, manifest, saved

_COMPARED = 4
_HOST, _DEADLINE_S = "127.0.0.1", 60.0


def check(scale: Scale, report: Report) -> None:
    """Version 0 starts the engine; version 1 comes as files, version 2 over NCCL."""
    with tempfile.TemporaryDirectory(prefix="headrace-gpu-check-") as folder:
        asyncio.run(_check(scale, report, Path(folder)))


async def _check(scale: Scale, report: Report, folder: Path) -> None:
    gpus = torch.cuda.device_count() if scale.device == "cuda" else 0
    device = "cuda:1" if gpus > 1 else scale.device  # vLLM takes the first
    if gpus > 1:
        torch.cuda.set_device(device)
    saved(build(scale.served, device, seed=0), folder / "0")
    model = build(scale.served, device, seed=1)
    sender, token = NcclSender(_HOST, device), POLICY
    offer = WeightOffer(token, sender, deadline_s=_DEADLINE_S)
    address = await offer.start(_HOST) if gpus > 1 else None
    transport = NcclWeights(lambda: address, token, 1, _DEADLINE_S) if gpus > 1 else None
    try:
        async with engine(scale, transport, enforce_eager=True) as made:
            await made.load(manifest(0), str(folder / "0"))
            weights = await asyncio.to_thread(_write, model, folder / "1", report)
            await _load(made, 1, folder / "1", len(weights), "file", report)
            await _serves(made, model, 1, scale, report)
            await asyncio.to_thread(_take_up, sender, weights, report)
            if gpus < 2:
                report.add(nccl=f"not run: it takes two GPUs, as NCCL refuses two ranks on one; here: {gpus}")
                return
            model = build(scale.served, device, seed=2)
            saved(model, folder / "2")
            await offer.offer("2", partial(sender.take_up, weight_file(model)))
            await _load(made, 2, folder / "2", len(weights), "nccl", report)
            await _serves(made, model, 2, scale, report)
    finally:
        if address is not None:
            await offer.close()


def _write(model: Any, folder: Path, report: Report) -> bytes:
    """Write a version as a learner does; returns the weights."""
    began = time.monotonic()
    weights = weight_file(model)
    report.add(gigabytes=len(weights) / 1e9, serialise_s=time.monotonic() - began)
    began = time.monotonic()
    folder.mkdir()
    for name, data in {**constant_files(model, {}), WEIGHT_FILE: weights}.items():
        (folder / name).write_bytes(data)
    report.add(write_s=time.monotonic() - began)
    return weights


async def _load(made: VllmEngine, number: int, folder: Path, size: int, how: str, report: Report) -> None:
    began = time.monotonic()
    await made.load(manifest(number), str(folder))
    seconds = time.monotonic() - began
    report.add(**{f"{how}_s": seconds, f"{how}_gb_per_s": size / 1e9 / seconds})


async def _serves(made: VllmEngine, model: Any, number: int, scale: Scale, report: Report) -> None:
    """What is sampled now comes from the new weights."""
    asked = requests(scale, _COMPARED, number, f"v{number}")
    found = differences(model, asked, await generate(made, asked))
    report.limit(f"gap_of_version_{number}", float(found.mean()), gap_limit(scale))


def _take_up(sender: NcclSender, weights: bytes, report: Report) -> None:
    began = time.monotonic()
    sender.take_up(weights)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds = time.monotonic() - began
    report.add(take_up_s=seconds, take_up_gb_per_s=len(weights) / 1e9 / seconds)
