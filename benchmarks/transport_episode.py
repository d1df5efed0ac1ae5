"""The episode that benchmarks of the transport carry, and what its codec, hash and gate cost on their own.

8 turns of 200 tokens, every other one sampled by the policy, with all that the episode loop records: ids, masks,
logprobs and version spans, texts, sampling parameters, tool calls, hashes, costs. Each turn also has a column of
proximal logprobs, which makes 13 bytes a token: 20.8 KB of arrays, the size that peers were measured with.

Everything cycles through `KEPT` episodes, memcpy included: a queue does not stay in the processor's cache. memcpy
copies payload after payload into a buffer of that size, as transports do. `memcpy in cache` is the same with 64 of
them, which is what the peers were measured with.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np

from headrace.platform.fidelity import check_episode
from headrace.platform.hashing import digest, hash_text
from headrace.platform.records import (
    ActionKind,
    AttemptId,
    Budgets,
    Cost,
    Episode,
    FinishReason,
    Role,
    SamplingParams,
    Status,
    StopReason,
    Task,
    TokenColumn,
    ToolCallRecord,
    Turn,
    VersionRef,
    VersionSpan,
    View,
)
from headrace.platform.records.codec import episode_codec

TURNS, TOKENS = 8, 200
KEPT, KEPT_IN_CACHE = 1024, 64
RAW_BYTES = TURNS * TOKENS * 13
VERSION = VersionRef("policy", 0, lineage=1)
SAMPLING = SamplingParams(max_new_tokens=TOKENS, stop_token_ids=(2,))


def make_episode(number: int) -> Episode:
    """Episode `number`: its own tokens, the same shape as all others."""
    rng = np.random.default_rng(number)
    return Episode(
        attempt_id=AttemptId("bench", number, 0),
        task=Task(f"task-{number}", "lookup", {"chain": ["k01", "k02"], "answer": "v03"}),
        environment="lookup",
        environment_version="1",
        seed=number,
        version=VERSION,
        turns=tuple(_sampled(rng, i) if i % 2 else _given(rng, i) for i in range(TURNS)),
        views=tuple(View(i, ((0, i),)) for i in range(1, TURNS, 2)),
        status=Status.OK,
        stop_reason=StopReason.TERMINATED,
        terminated=True,
        truncated=False,
        budgets=Budgets(TURNS, TURNS * TOKENS, 60.0),
        duration_s=12.5,
        worker_id="worker-0",
    )


def _sampled(rng: np.random.Generator, index: int) -> Turn:
    return Turn(
        role=Role.ASSISTANT,
        token_ids=_ids(rng),
        action_mask=np.ones(TOKENS, np.uint8),
        behaviour_logprobs=-rng.random(TOKENS, np.float32),
        content=f"I look up k{index:02d} next.",
        version_spans=(VersionSpan(VERSION, 0, TOKENS),),
        sampling=SAMPLING,
        seed=index,
        finish_reason=FinishReason.STOP,
        engine_build="torch-2",
        replica="replica-0",
        action_kind=ActionKind.TOOL,
        tool_calls=(
            ToolCallRecord(index=0, call_id="call-0", name="get", arguments={"key": f"k{index:02d}"}, key="bench/0"),
        ),
        state_hash=hash_text(f"state {index}"),
        cost=Cost(0, TOKENS, 1, 0.5),
        started_s=float(index),
        ended_s=index + 0.5,
        token_columns=_column(rng),
    )


def _given(rng: np.random.Generator, index: int) -> Turn:
    return Turn(
        role=Role.TOOL,
        token_ids=_ids(rng),
        action_mask=np.zeros(TOKENS, np.uint8),
        behaviour_logprobs=np.zeros(TOKENS, np.float32),
        content=f"k{index:02d} is v{index:02d}",
        tool_call_id="call-0",
        observation_hash=hash_text(f"observation {index}"),
        state_hash=hash_text(f"state {index}"),
        token_columns=_column(rng),
    )


def _ids(rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, 150_000, TOKENS, np.int32)


def _column(rng: np.random.Generator) -> dict[str, TokenColumn]:
    return {"proximal_logprobs": TokenColumn(-rng.random(TOKENS, np.float32), "action", "learner")}


def payload_bytes() -> int:
    """The size of an encoded episode."""
    return len(episode_codec.encode(make_episode(0)))


def part_costs(repeats: int) -> dict[str, list[float]]:
    """Microseconds of CPU per episode of each part on its own, `repeats` samples each, taken in turns."""
    episodes = [make_episode(number) for number in range(KEPT)]
    payloads = [episode_codec.encode(episode) for episode in episodes]
    size = len(payloads[0])
    room = memoryview(bytearray(size * KEPT))

    def copy(i: int) -> None:
        room[i * size : (i + 1) * size] = payloads[i][:size]

    parts: dict[str, tuple[Callable[[int], object], int]] = {
        "memcpy": (copy, KEPT),
        "memcpy in cache": (copy, KEPT_IN_CACHE),
        "encode": (lambda i: episode_codec.encode(episodes[i]), KEPT),
        "decode": (lambda i: episode_codec.decode(payloads[i]), KEPT),
        "sha-256": (lambda i: digest(payloads[i]), KEPT),
        "fidelity gate": (lambda i: check_episode(episodes[i], from_wire=True), KEPT),
    }
    samples: dict[str, list[float]] = {name: [] for name in parts}
    for repeat in range(repeats + 1):
        for name, (part, kept) in parts.items():
            figure = _cost(part, [i % kept for i in range(KEPT)])
            if repeat:  # the first one warms up
                samples[name].append(figure)
    return samples


def _cost(part: Callable[[int], object], indices: Sequence[int]) -> float:
    before = time.process_time()
    for i in indices:
        part(i)
    return (time.process_time() - before) / len(indices) * 1e6
