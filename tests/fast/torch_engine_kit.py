"""Tiny models on disk, requests and references for the tests of the torch engine."""

import asyncio
import dataclasses
from pathlib import Path

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.utils import logging as transformers_logging

from headrace.platform.records.generation import Generation, GenerationRequest, SamplingParams
from headrace.platform.records.versions import VersionManifest, VersionRef
from headrace.serving.torch_engine import TorchEngine

torch.set_num_threads(1)
transformers_logging.disable_progress_bar()

VOCABULARY = 61
POSITIONS = 64
_SIZE = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": POSITIONS,
}
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, tie_word_embeddings=True, **_SIZE)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(num_key_value_heads=2, **_SIZE)),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**_SIZE)),
}


def save_model(folder: Path, seed: int, family: str = "llama") -> str:
    """A random model with logits spread widely enough for wrong ones to show."""
    torch.manual_seed(seed)
    model = FAMILIES[family]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.25)
    model.save_pretrained(folder)
    return str(folder)


def manifest(number: int, policy_id: str = "tiny") -> VersionManifest:
    return VersionManifest(
        ref=VersionRef(policy_id, number),
        parent=None,
        parent_hash="",
        fence=1,
        kind="full",
        content_hash=f"hash-{number}",
        batches=0,
        path="",
    )


def make_engine(inline: bool = True, **options) -> TorchEngine:
    defaults = {"max_sessions": 32, "max_batch": 16, "max_positions": POSITIONS, "policy_id": "tiny"}
    return TorchEngine(replica="r0", inline=inline, **{**defaults, **options})


def request(session: str, ids, version: int = 0, seed: int = 5, deadline_s: float = 60.0, **sampling):
    params = SamplingParams(**{"max_new_tokens": 6, **sampling})
    array = np.array(ids, np.int32)
    return GenerationRequest(f"{session}/{len(ids)}", session, array, version, seed, params, deadline_s)


@dataclasses.dataclass
class Played:
    """A finished multi-turn session: its ids, and for each sampled turn where it begins and what was reported."""

    ids: list[int]
    turns: list[tuple[int, Generation]]
    version: int


async def play(engine: TorchEngine, session: str, index: int, version: int = 0, turns: int = 3, **sampling) -> Played:
    """A session of uneven turns: context, sampled tokens, more context, and so on."""
    rng = np.random.default_rng(index)
    ids, sampled = rng.integers(0, VOCABULARY, 2 + index % 7).tolist(), []
    for turn in range(turns):
        limit = 2 + (index + turn) % 5
        generation = await engine.generate(request(session, ids, version, seed=index, max_new_tokens=limit, **sampling))
        sampled.append((len(ids), generation))
        ids += generation.token_ids.tolist() + rng.integers(0, VOCABULARY, 1 + (index * turn) % 6).tolist()
    return Played(ids, sampled, version)


async def play_many(engine: TorchEngine, count: int, versions=(0,), **sampling) -> list[Played]:
    return await asyncio.gather(
        *(play(engine, f"s{i}", i, versions[i % len(versions)], **sampling) for i in range(count))
    )


def assert_logprobs(folder: str, played: list[Played], temperature: float) -> None:
    """Reported logprobs are log_softmax(logits / T) of a plain forward pass over the whole session."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for session in played:
        with torch.no_grad():
            logits = model(torch.tensor([session.ids])).logits[0].double()
        expected = torch.log_softmax(logits / temperature, -1)
        for start, generation in session.turns:
            rows = torch.arange(start - 1, start - 1 + len(generation.token_ids))
            wanted = expected[rows, torch.tensor(generation.token_ids, dtype=torch.int64)]
            np.testing.assert_allclose(generation.logprobs, wanted.numpy(), atol=1e-4)
