"""What vLLM is asked, and what its answers mean: without vLLM."""

from types import SimpleNamespace

import numpy as np
import pytest

from headrace.platform.config.serving import VllmConfig
from headrace.platform.errors import EngineError
from headrace.platform.records.generation import GenerationRequest, SamplingParams
from headrace.platform.records.versions import VersionRef, VersionSpan
from headrace.serving.vllm_requests import Sampled, engine_args, joined, sampled_of, sampling_args, spans_of

V3, V4 = VersionRef("tiny", 3), VersionRef("tiny", 4)
REFS = {"3.0": V3, "4.0": V4}


def request(length: int = 3, seed: int = 7, **sampling) -> GenerationRequest:
    ids = np.arange(length, dtype=np.int32)
    return GenerationRequest("k", "s", ids, 3, seed, SamplingParams(**sampling))


def label(version: str, start: int, end: int) -> SimpleNamespace:
    return SimpleNamespace(version=version, start=start, end=end)


def output(ids, logprobs, labels=(), ended="length") -> SimpleNamespace:
    flat = SimpleNamespace(logprobs=logprobs)
    return SimpleNamespace(token_ids=ids, logprobs=flat, weight_versions=list(labels), finish_reason=ended)


def arguments(config: VllmConfig, on_cpu: bool) -> dict:
    return engine_args(config, path="m", on_cpu=on_cpu, max_batch=8, max_positions=64, tensor_parallel=1)


def test_engine_arguments_follow_the_device():
    cpu, gpu = arguments(VllmConfig(kv_cache_mib=3), True), arguments(VllmConfig(gpu_memory_utilization=0.5), False)
    assert (cpu["dtype"], cpu["kv_cache_memory_bytes"], cpu["enforce_eager"]) == ("float32", 3 << 20, True)
    assert (gpu["dtype"], gpu["gpu_memory_utilization"], gpu["enforce_eager"]) == ("bfloat16", 0.5, False)
    assert not cpu["enable_chunked_prefill"] and cpu["max_num_batched_tokens"] >= cpu["max_model_len"]
    assert "kv_cache_memory_bytes" not in gpu and "enable_lora" not in gpu
    for args in (cpu, gpu):
        assert (args["max_num_seqs"], args["max_model_len"], args["model"]) == (8, 64, "m")
        assert args["logprobs_mode"] == "processed_logprobs"
    assert arguments(VllmConfig(dtype="float16"), True)["dtype"] == "float16"


def test_engine_arguments_have_a_spare_place_for_an_adapter_and_the_users_last_word():
    args = arguments(VllmConfig(adapters=2, max_lora_rank=4, engine_args={"block_size": 16}), True)
    assert (args["max_loras"], args["max_cpu_loras"], args["max_lora_rank"]) == (3, 3, 4)
    assert args["block_size"] == 16


def test_sampling_arguments():
    asked = request(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, max_new_tokens=10, stop_token_ids=(4, 5))
    args = sampling_args(asked, 0, 64)
    assert (args["temperature"], args["top_p"], args["top_k"], args["min_p"]) == (0.7, 0.9, 5, 0.1)
    assert (args["stop_token_ids"], args["ignore_eos"], args["max_tokens"]) == ([4, 5], True, 10)
    assert sampling_args(asked, 4, 64)["max_tokens"] == 6
    assert sampling_args(asked, 0, 8)["max_tokens"] == 5
    assert sampling_args(asked, 4, 8)["max_tokens"] == 1
    with pytest.raises(EngineError, match="temperature"):
        sampling_args(request(temperature=0.001), 0, 64)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, 2**64 - 1, -(2**63)])
def test_seeds_are_in_vllms_range_and_differ_along_an_episode(seed):
    seeds = [sampling_args(request(length, seed), sampled, 64)["seed"] for length, sampled in ((3, 0), (4, 0), (3, 1))]
    assert all(0 <= each < 2**63 for each in seeds)
    assert seeds[1] == seeds[2] != seeds[0]


def test_logprobs_and_spans_of_an_answer():
    answer = output([5, 6, 7], [-1.0, 1e-9, -2.0], [label("3.0", 0, 2), label("4.0", 2, 3)], "stop")
    got = sampled_of(answer, request(), REFS, None)
    assert (got.token_ids.tolist(), got.logprobs.tolist(), got.ended) == ([5, 6, 7], [-1.0, 0.0, -2.0], "stop")
    assert got.spans == (VersionSpan(V3, 0, 2), VersionSpan(V4, 2, 3))
    assert (got.token_ids.dtype, got.logprobs.dtype) == (np.int32, np.float32)


def test_greedy_answers_are_certain_and_adapters_name_themselves():
    answer = output([5], [-3.0], [label("3.0", 0, 1)])
    assert sampled_of(answer, request(temperature=0.0), REFS, None).logprobs.tolist() == [0.0]
    assert sampled_of(answer, request(), REFS, V4).spans == (VersionSpan(V4, 0, 1),)
    assert sampled_of(output([], [], (), "abort"), request(), REFS, V4).spans == ()


@pytest.mark.parametrize("logprobs", [[float("nan")], [float("-inf")], []])
def test_answers_without_a_distribution_are_refused(logprobs):
    with pytest.raises(EngineError, match="not finite"):
        sampled_of(output([5], logprobs, [label("3.0", 0, 1)]), request(), REFS, None)


@pytest.mark.parametrize(
    "labels",
    [
        [],
        [label("default", 0, 3)],
        [label("3.0", 0, 2)],
        [label("3.0", 1, 3)],
        [label("3.0", 0, 1), label("4.0", 2, 3)],
        [label("default", 0, 0), label("3.0", 0, 3)],
    ],
)
def test_spans_with_gaps_or_strangers_are_refused(labels):
    # P22: every token names its version
    with pytest.raises(EngineError, match="under which weights"):
        spans_of(labels, REFS, 3)


def test_parts_are_joined():
    def part(ids, spans, ended="abort"):
        return Sampled(
            token_ids=np.array(ids, np.int32),
            logprobs=np.array(ids, np.float32),
            spans=tuple(spans),
            ended=ended,
        )

    parts = [
        part([1, 2], [VersionSpan(V3, 0, 2)]),
        part([], []),
        part([3], [VersionSpan(V3, 0, 1)]),
        part([4, 5], [VersionSpan(V4, 0, 2)], "stop"),
    ]
    ids, logprobs, spans = joined(parts)
    assert ids.tolist() == logprobs.tolist() == [1, 2, 3, 4, 5]
    assert spans == (VersionSpan(V3, 0, 3), VersionSpan(V4, 3, 5))
