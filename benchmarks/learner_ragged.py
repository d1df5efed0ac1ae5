"""The learner's step on ragged episodes: how near it comes to the arithmetic limit of one core.

32 episodes of 50 to 1,500 tokens in 4 groups of 8, each group with a prompt of its own of 20 to 400 tokens; a generated
Llama of 4 layers, width 256, vocabulary 512, fp32, one thread. A step is the product's: `TorchBackend.step` with GRPO,
clipping and AdamW.

- `padded`: microbatches in order of length, padded on the right.
- `packed`: samples one after the other in one row.
- `packed, shared prompts`: what the samples of a group begin with is computed once.
- `trl`: TRL's GRPO loss; absent, see README.md.

Fraction of peak: floating-point operations of matrix products and attention *as each system executes them*, backward
twice forward, recomputation and elementwise work not counted, over CPU time and over the peak. The peak is the best of
`PEAK_SHAPES` by torch.mm, measured before each step. `useful_fraction` counts for every system what the episodes need
without sharing and without padding. Systems take turns, repetition by repetition; figures are medians.

Memory: what a step adds to the largest resident size of a process of its own, after a small step has made optimizer
state and buffers, for each token of the episodes.

The ratio is the fraction of peak with shared prompts; it holds when it and that of `packed` reach their targets.
"""

import argparse
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from common import absent, result, row_of, table
from transformers import LlamaConfig, LlamaForCausalLM

from headrace import __version__
from headrace.platform.config import GrpoConfig, LearnerConfig
from headrace.platform.records import f32, i32
from headrace.trainer.algorithms import Grpo
from headrace.trainer.backends.torch import TorchBackend
from headrace.trainer.batch import MicroBatch, pack
from headrace.trainer.packing import PackedBatch
from headrace.trainer.samples import Sample

PACKED_TARGET, SHARED_TARGET = 0.72, 0.78
LAYERS, WIDTH, HEADS, INNER, VOCABULARY = 4, 256, 4, 688, 512
GROUPS, MEMBERS, SHORTEST, LONGEST = 4, 8, 50, 1500
MICROBATCH_TOKENS = 4096
PEAK_SHAPES = ((4096, 256, 688), (4096, 688, 256), (4096, 1024, 1024), (1024, 1024, 1024))
SYSTEMS = ("padded", "packed", "packed, shared prompts")


class PaddedBackend(TorchBackend):
    """The product's backend as it treats a model that cannot be packed."""

    def _microbatches(self, batch: Sequence[Sample]) -> list[MicroBatch]:
        return pack(batch, MICROBATCH_TOKENS)


def backend_of(system: str) -> TorchBackend:
    """The same weights for every system."""
    torch.manual_seed(0)
    shape = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=HEADS, tie_word_embeddings=False))
    config = LearnerConfig(threads=1, microbatch_tokens=MICROBATCH_TOKENS, share_prefixes=system == SYSTEMS[2])
    return PaddedBackend(model, config) if system == "padded" else TorchBackend(model, config)


def episodes() -> list[Sample]:
    """Lengths are log-normal around 350; three of five sampled tokens are actions, the rest observations."""
    rng = np.random.default_rng(1)
    found = []
    for group in range(GROUPS):
        prompt = rng.integers(3, VOCABULARY, int(rng.integers(20, 401)))
        for member in range(MEMBERS):
            wanted = math.exp(rng.normal() * 0.85 + math.log(350))
            own = max(30, int(np.clip(wanted, SHORTEST, LONGEST)) - len(prompt))
            mask = np.concatenate([np.zeros(len(prompt), np.uint8), np.arange(own) % 200 < 120]).astype(np.uint8)
            found.append(
                Sample(
                    episode_id=f"bench.t{group}.{member}.0",
                    agent_id="",
                    segment=0,
                    lag=0,
                    token_ids=i32([*prompt, *rng.integers(3, VOCABULARY, own)]),
                    action_mask=mask,
                    loss_mask=mask,
                    behaviour_logprobs=f32(mask * -math.log(VOCABULARY)),
                    advantages=f32(mask * rng.normal()),
                    temperatures=np.ones(len(mask), np.float32),
                )
            )
    return found


def operations(tokens: int, pairs: float, chosen: int) -> float:
    """Forward and backward: of `tokens` through the layers, `pairs` of tokens that see each other, and `chosen` tokens
    through the output layer."""
    layer = 2 * tokens * (4 * WIDTH * WIDTH + 3 * WIDTH * INNER) + 4 * WIDTH * pairs
    return 3.0 * (LAYERS * layer + 2 * chosen * WIDTH * VOCABULARY)


def executed(batches: Sequence[MicroBatch | PackedBatch]) -> float:
    """What a step over `batches` computes; of a causal square its half."""
    total = 0.0
    for batch in batches:
        chosen = int(batch.loss_mask.sum())
        if isinstance(batch, MicroBatch):
            rows, length = batch.token_ids.shape[0], batch.token_ids.shape[1] - 1
            total += operations(rows * length, rows * length**2 / 2, chosen)
            continue
        pairs = sum((p.last - p.first) * (p.key_last - p.key_first) * (0.5 if p.causal else 1.0) for p in batch.parts)
        total += operations(len(batch.token_ids), pairs, chosen)
    return total


def peak() -> float:
    """Operations per CPU second of the best of `PEAK_SHAPES`."""
    best = 0.0
    for rows, inner, columns in PEAK_SHAPES:
        one, other = torch.randn(rows, inner), torch.randn(inner, columns)
        torch.mm(one, other)
        for _ in range(3):
            began = time.process_time()
            torch.mm(one, other)
            best = max(best, 2.0 * rows * inner * columns / (time.process_time() - began))
    return best


def memory(system: str) -> int:
    """Bytes that a step adds to the largest resident size; for a process of its own."""
    backend, algorithm, given = backend_of(system), Grpo(GrpoConfig()), episodes()
    backend.step(sorted(given, key=lambda sample: sample.length)[:2], algorithm)
    before = largest_resident()
    backend.step(given, algorithm)
    return largest_resident() - before


def largest_resident() -> int:
    """Bytes; of this program alone, while getrusage also has what the parent had when it started this one."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def measured_memory(system: str) -> int:
    """`memory` in a child process."""
    done = subprocess.run([sys.executable, __file__, "--memory-of", system], capture_output=True, text=True, check=True)
    return int(done.stdout)


def measure(repeats: int) -> dict[str, list[tuple[float, float]]]:
    """For each system CPU seconds of a step and the peak just before it, after a step that warms up."""
    given, algorithm = episodes(), Grpo(GrpoConfig())
    backends = {system: backend_of(system) for system in SYSTEMS}
    found: dict[str, list[tuple[float, float]]] = {system: [] for system in SYSTEMS}
    for repeat in range(repeats + 1):
        for system, backend in backends.items():
            limit, began = peak(), time.process_time()
            backend.step(given, algorithm)
            if repeat:
                found[system].append((time.process_time() - began, limit))
    return found


def main() -> None:
    """Measure, print a table, and with --json one object on the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--memory-of", choices=SYSTEMS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.memory_of:
        sys.stdout.write(f"{memory(arguments.memory_of)}\n")
        return
    given = episodes()
    tokens, chosen = sum(s.length for s in given), sum(s.loss_tokens for s in given)
    needed = operations(tokens, sum(s.length**2 / 2 for s in given), chosen)
    rows, fractions = [], {}
    for system, samples in measure(arguments.repeats).items():
        does = executed(backend_of(system)._microbatches(given))
        of_peak = [does / seconds / limit for seconds, limit in samples]
        fractions[system] = statistics.median(of_peak)
        extra = {
            "tokens_per_cpu_s": round(statistics.median(tokens / seconds for seconds, _ in samples)),
            "useful_fraction": round(statistics.median(needed / seconds / limit for seconds, limit in samples), 3),
            "gflop": round(does / 1e9, 1),
            "peak_gflop_per_s": round(statistics.median(limit for _, limit in samples) / 1e9, 1),
            "memory_kb_per_token": round(measured_memory(system) / tokens / 1e3, 1),
        }
        rows.append(row_of(system, __version__, "of peak", of_peak, **extra))
    rows.append(absent("trl", "of peak"))
    packed, shared = fractions[SYSTEMS[1]], fractions[SYSTEMS[2]]
    sys.stdout.write(table(rows) + "\n")
    sys.stdout.write(
        f"fraction of peak: packed {packed:.3f} (target {PACKED_TARGET}), with shared prompts {shared:.3f} "
        f"(target {SHARED_TARGET}); {len(given)} episodes, {tokens} tokens, {chosen} in the loss\n"
    )
    if arguments.json:
        holds = packed >= PACKED_TARGET and shared >= SHARED_TARGET
        facts = {"packed": round(packed, 3), "packed_target": PACKED_TARGET, "tokens": tokens, "loss_tokens": chosen}
        sys.stdout.write(result("learner_ragged", shared, SHARED_TARGET, holds, rows, **facts) + "\n")


if __name__ == "__main__":
    main()
