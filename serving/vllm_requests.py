"""From our requests to vLLM's words and back. Pure: nothing here imports vLLM or waits.

Owns the arguments of the engine and of a request, and what its outputs mean. Invariants: the logprobs are those of the
distribution sampled from, so `logprobs_mode` is the processed one and temperature zero has logprob 0; only the stop ids
of a request end it, never the model's own end token; a stop id is part of the ids.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from headrace.platform.config.serving import VllmConfig
from headrace.platform.errors import EngineError
from headrace.platform.records.arrays import F32, I32
from headrace.platform.records.generation import GenerationRequest
from headrace.platform.records.versions import VersionRef, VersionSpan
from headrace.platform.seeding import nth_seed

_LOWEST_TEMPERATURE = 0.01
"""Below it vLLM samples at another temperature than it was asked for."""
_BLOCK_SIZE = 32
"""Tokens of a block of keys and values on a CPU. Only whole blocks are found again, so small is good."""
_STEP_TOKENS = 4096
"""Tokens that one step may compute on a CPU, or those of one context where it is longer."""


class WeightVersion(Protocol):
    """What vLLM says about who sampled: tokens `[start, end)` under the label `version`."""

    version: str
    start: int
    end: int


@dataclass(kw_only=True, slots=True, frozen=True)
class Sampled:
    """What one request of vLLM gave: ids i32[L], logprobs f32[L] and their spans.

    `ended` is why: "stop", "length", or "abort" for one that was taken out to go on under other weights.
    """

    token_ids: I32
    logprobs: F32
    spans: tuple[VersionSpan, ...]
    ended: str


NOTHING = Sampled(token_ids=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32), spans=(), ended="length")
"""There was no room for a token."""


def engine_args(
    config: VllmConfig,
    *,
    path: str,
    on_cpu: bool,
    max_batch: int,
    max_positions: int,
    tensor_parallel: int,
) -> dict[str, Any]:
    """The arguments of vLLM's AsyncEngineArgs for the model folder `path`, but for the executor.

    With adapters one place more than the configured number is kept, so that a new one is whole before the oldest goes.
    """
    args: dict[str, Any] = {
        "model": path,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "load_format": "safetensors",
        "use_tqdm_on_load": False,
        "dtype": ("float32" if on_cpu else "bfloat16") if config.dtype == "auto" else config.dtype,
        "max_model_len": max_positions,
        "max_num_seqs": max_batch,
        "enforce_eager": on_cpu,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "tensor_parallel_size": tensor_parallel,
        "disable_log_stats": True,
    }
    if on_cpu:
        args |= {
            "kv_cache_memory_bytes": config.kv_cache_mib << 20,
            "block_size": _BLOCK_SIZE,
            # A prompt in chunks makes vLLM turn the generator of a seeded request back, which a CPU's cannot: it dies.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(max_positions, _STEP_TOKENS),
        }
    else:
        args["gpu_memory_utilization"] = config.gpu_memory_utilization
    if config.adapters:
        places = config.adapters + 1
        args |= {
            "enable_lora": True,
            "max_loras": places,
            "max_cpu_loras": places,
            "max_lora_rank": config.max_lora_rank,
        }
    return args | config.engine_args


def sampling_args(request: GenerationRequest, sampled: int, max_positions: int) -> dict[str, Any]:
    """The arguments of vLLM's SamplingParams for what is left of a request of which `sampled` tokens are there.

    vLLM draws the tokens of one request from one generator. Ours is named by the seed and the length of the context,
    so that turns with one seed, and a request that goes on from a prefix, draw fresh numbers.

    Raises:
        EngineError: vLLM cannot sample like this.
    """
    sampling = request.sampling
    if 0 < sampling.temperature < _LOWEST_TEMPERATURE:
        raise EngineError(f"generation {request.key}: vLLM samples at no temperature below {_LOWEST_TEMPERATURE} but 0")
    length = len(request.token_ids) + sampled
    return {
        "max_tokens": min(sampling.max_new_tokens - sampled, max_positions - length),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": nth_seed(request.seed, length),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,
        "detokenize": False,
        "logprobs": 0,
        "flat_logprobs": True,
    }


def sampled_of(
    output: Any,  # vLLM's CompletionOutput with flat logprobs
    request: GenerationRequest,
    refs: Mapping[str, VersionRef],
    adapter: VersionRef | None,
) -> Sampled:
    """What vLLM's final output says.

    Args:
        output: its CompletionOutput.
        request: what was asked for.
        refs: the version behind every label that vLLM was ever given.
        adapter: the version that the request ran under, where its labels name the base beneath it only.

    Raises:
        EngineError: a logprob is not finite, or vLLM does not say under which weights it sampled.
    """
    ids = np.array(output.token_ids, np.int32)
    logprobs = np.array(output.logprobs.logprobs if len(ids) else (), np.float32)
    if len(ids) != len(logprobs) or not np.isfinite(logprobs).all():
        raise EngineError(f"generation {request.key}: the weights give logits that are not finite")
    if request.sampling.temperature <= 0:
        logprobs = np.zeros_like(logprobs)
    if adapter is not None:
        spans: tuple[VersionSpan, ...] = (VersionSpan(adapter, 0, len(ids)),) if len(ids) else ()
    else:
        spans = spans_of(output.weight_versions or (), refs, len(ids))
    return Sampled(
        token_ids=ids, logprobs=np.minimum(logprobs, np.float32(0)), spans=spans, ended=str(output.finish_reason)
    )


def spans_of(labels: Sequence[WeightVersion], refs: Mapping[str, VersionRef], count: int) -> tuple[VersionSpan, ...]:
    """vLLM's labels as spans that cover `count` tokens in order without gaps (P22). Raises EngineError."""
    spans = tuple(VersionSpan(refs[label.version], label.start, label.end) for label in labels if label.version in refs)
    ends = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != ends[:-1] or ends[-1] != count or len(spans) != len(labels):
        named = [(label.version, label.start, label.end) for label in labels]
        raise EngineError(f"vLLM does not say under which weights it sampled {count} tokens: {named}")
    return spans


def joined(parts: Sequence[Sampled]) -> tuple[I32, F32, tuple[VersionSpan, ...]]:
    """The parts of one generation as one: ids, logprobs and spans; neighbours of one version are one span."""
    spans: list[VersionSpan] = []
    start = 0
    for part in parts:
        for span in part.spans:
            here = VersionSpan(span.version, start + span.start, start + span.end)
            if spans and spans[-1].version == here.version:
                here = VersionSpan(here.version, spans.pop().start, here.end)
            spans.append(here)
        start += len(part.token_ids)
    ids = np.concatenate([part.token_ids for part in parts])
    return ids, np.concatenate([part.logprobs for part in parts]), tuple(spans)
