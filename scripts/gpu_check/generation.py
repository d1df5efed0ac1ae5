"""vLLM with bfloat16: tokens a second, and its logprobs against transformers' on the same weights."""

import asyncio
import tempfile
import time
from pathlib import Path

import torch

from .engines import differences, engine, gap_limit, generate, requests
from .report import Report
from .scale import Scale, build, manifest, saved

_COMPARED = 32


def check(scale: Scale, report: Report) -> None:
    """Start, warm up, sample all requests at once, compare."""
    with tempfile.TemporaryDirectory(prefix="headrace-gpu-check-") as folder:
        asyncio.run(_check(scale, report, Path(folder)))


async def _check(scale: Scale, report: Report, folder: Path) -> None:
    model = build(scale.served, scale.device, seed=0)
    report.add(parameters=sum(each.numel() for each in model.parameters()))
    saved(model, folder / "0")
    async with engine(scale) as made:
        began = time.monotonic()
        await made.load(manifest(0), str(folder / "0"))
        report.add(start_s=time.monotonic() - began)
        warm = await generate(made, requests(scale, scale.requests, 0, "warm-up"))
        report.add(build=warm[0].engine_build, requests=scale.requests, prompt=scale.prompt, sampled=scale.sampled)
        asked = requests(scale, scale.requests, 0, "measured")
        began = time.monotonic()
        got = await generate(made, asked)
        seconds = time.monotonic() - began
    report.add(sampled_tokens_per_s=sum(len(each.token_ids) for each in got) / seconds)
    asked, got = asked[:_COMPARED], got[:_COMPARED]
    report.add(gap_to_float32=float(differences(model, asked, got).mean()))
    if scale.device == "cuda":
        model = model.to(torch.bfloat16)
    found = differences(model, asked, got)
    report.add(compared_tokens=len(found), largest_gap=float(found.max()))
    report.limit("gap", float(found.mean()), gap_limit(scale))
