"""vLLM in a check: started through the product's engine, asked, and compared with transformers."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import torch

from headrace.platform.config.serving import VllmConfig
from headrace.platform.records import GenerationRequest, SamplingParams, i32
from headrace.platform.records.generation import Generation
from headrace.serving.vllm_engine import VllmEngine
from headrace.serving.vllm_weights import WeightTransport

from .scale import POLICY, Scale

BFLOAT16_GAP, FLOAT32_GAP = 0.05, 1e-3
"""How far vLLM and transformers may be apart, mean over sampled tokens in nats; the first is what docs give as a
`learner.gap_limit` for bfloat16."""
_DEADLINE_S = 120.0


def gap_limit(scale: Scale) -> float:
    """vLLM computes in bfloat16 on a GPU and in fp32 on a CPU."""
    return BFLOAT16_GAP if scale.device == "cuda" else FLOAT32_GAP


@asynccontextmanager
async def engine(
    scale: Scale, transport: WeightTransport | None = None, **engine_args: object
) -> AsyncIterator[VllmEngine]:
    """An engine that is closed at the end; its first load starts vLLM. It takes half of the device's memory."""
    made = VllmEngine(
        replica=POLICY,
        policy_id=POLICY,
        max_sessions=scale.requests,
        max_batch=scale.requests,
        max_positions=scale.prompt + scale.sampled + 1,
        config=VllmConfig(gpu_memory_utilization=0.5, engine_args=engine_args),
        control_deadline_s=_DEADLINE_S,
        start_deadline_s=_DEADLINE_S,
        transport=transport,
    )
    try:
        yield made
    finally:
        await made.close()


def requests(scale: Scale, count: int, version: int, label: str) -> list[GenerationRequest]:
    """Random prompts, of which no two begin alike; every one samples as many tokens as the scale says."""
    dice = np.random.default_rng([version, count, len(label)])
    return [
        GenerationRequest(
            key=f"{label}/{number}",
            session=f"{label}/{number}",
            token_ids=i32(dice.integers(3, scale.served.vocabulary, scale.prompt)),
            version=version,
            seed=number,
            sampling=SamplingParams(max_new_tokens=scale.sampled),
            deadline_s=_DEADLINE_S,
        )
        for number in range(count)
    ]


async def generate(made: VllmEngine, asked: Sequence[GenerationRequest]) -> list[Generation]:
    """All at once."""
    return await asyncio.gather(*(made.generate(each) for each in asked))


@torch.no_grad()
def differences(model: Any, asked: Sequence[GenerationRequest], got: Sequence[Generation]) -> np.ndarray:
    """Of each sampled token, |reported logprob - that of a plain forward pass of `model`|."""
    device, found = next(model.parameters()).device, []
    for request, generation in zip(asked, got, strict=True):
        sampled = torch.from_numpy(generation.token_ids.astype(np.int64)).to(device)
        prompt = torch.from_numpy(request.token_ids.astype(np.int64)).to(device)
        logits = model(input_ids=torch.cat([prompt, sampled])[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits.float(), -1).gather(1, sampled[:, None])[:, 0].cpu().numpy()
        found.append(np.abs(expected - generation.logprobs))
    return np.concatenate(found)
