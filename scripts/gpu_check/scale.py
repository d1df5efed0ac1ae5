"""How large a check is, and the generated models and requests that it runs on.

`GPU` is for one device with 24 GB or more. `REHEARSAL` is the same check in small on a CPU: its figures mean nothing,
but every line runs. Models are random Llamas whose logits have a spread of about one, so that wrong ones show.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.platform.records import f32, i32
from headrace.platform.records.versions import VersionManifest, VersionRef
from headrace.trainer.model import save_folder
from headrace.trainer.samples import Sample

POLICY = "gpu-check"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A Llama with as many key heads as heads, and an output layer of its own."""

    layers: int
    width: int
    heads: int
    inner: int
    vocabulary: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """Sizes of a check.

    `served` is for vLLM: `requests` at once, each a prompt of `prompt` tokens and `sampled` tokens after it. `trained`
    is for the learner: `groups` of `members` episodes of at most `longest` tokens, `microbatch_tokens` in a pass.
    `peak_shapes` are products (rows, inner, columns), the fastest of which counts as the device's limit.
    """

    device: str
    served: Shape
    requests: int
    prompt: int
    sampled: int
    trained: Shape
    groups: int
    members: int
    longest: int
    microbatch_tokens: int
    peak_shapes: tuple[tuple[int, int, int], ...]


GPU = Scale(
    device="cuda",
    served=Shape(layers=16, width=2048, heads=16, inner=5632, vocabulary=32000),
    requests=256,
    prompt=128,
    sampled=128,
    trained=Shape(layers=6, width=2048, heads=16, inner=5632, vocabulary=16000),
    groups=8,
    members=8,
    longest=1500,
    microbatch_tokens=4096,
    peak_shapes=((4096, 2048, 5632), (4096, 5632, 2048), (8192, 8192, 8192)),
)
REHEARSAL = Scale(
    device="cpu",
    served=Shape(layers=2, width=64, heads=2, inner=96, vocabulary=128),
    requests=4,
    prompt=12,
    sampled=8,
    trained=Shape(layers=2, width=64, heads=2, inner=96, vocabulary=128),
    groups=2,
    members=3,
    longest=60,
    microbatch_tokens=128,
    peak_shapes=((128, 64, 96),),
)


def build(shape: Shape, device: str, seed: int) -> Any:
    """A random model in fp32 on `device`, in evaluation mode."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        vocab_size=shape.vocabulary,
        max_position_embeddings=4096,
        initializer_range=1 / math.sqrt(shape.width),
        tie_word_embeddings=False,
    )
    with torch.device(device):
        return LlamaForCausalLM(config).eval()


def saved(model: Any, folder: Path) -> Path:
    """The model as the files of a version; returns its folder."""
    save_folder(model, folder, {})
    return folder


def manifest(number: int) -> VersionManifest:
    """Of a version with full weights."""
    return VersionManifest(
        ref=VersionRef(POLICY, number),
        parent=None,
        parent_hash="",
        fence=1,
        kind="full",
        content_hash=f"{POLICY}-{number}",
        batches=0,
        path="",
    )


def episodes(scale: Scale) -> list[Sample]:
    """Ragged samples, those of a group with a prompt in common; three of five tokens after it are actions.

    Lengths are log-normal around a quarter of the longest.
    """
    rng = np.random.default_rng(1)
    vocabulary, found = scale.trained.vocabulary, []
    for group in range(scale.groups):
        prompt = rng.integers(3, vocabulary, int(rng.integers(scale.longest // 75 + 1, scale.longest // 4)))
        for member in range(scale.members):
            wanted = math.exp(rng.normal() * 0.85 + math.log(scale.longest / 4))
            own = max(scale.longest // 30, int(min(wanted, scale.longest)) - len(prompt))
            mask = np.concatenate([np.zeros(len(prompt), np.uint8), np.arange(own) % 10 < 6]).astype(np.uint8)
            found.append(
                Sample(
                    episode_id=f"{POLICY}.t{group}.{member}.0",
                    agent_id="",
                    segment=0,
                    lag=0,
                    token_ids=i32([*prompt, *rng.integers(3, vocabulary, own)]),
                    action_mask=mask,
                    loss_mask=mask,
                    behaviour_logprobs=f32(mask * -math.log(vocabulary)),
                    advantages=f32(mask * rng.normal()),
                    temperatures=np.ones(len(mask), np.float32),
                )
            )
    return found
