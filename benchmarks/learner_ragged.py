"""The learner's step on ragged episodes: how near it comes to the arithmetic limit of one core.

32 episodes of 50 to 1,500 tokens in 4 groups of 8, each group with a prompt of its own of 20 to 400 tokens; a generated
Llama of 4 layers, width 256, vocabulary 512, fp32, one thread. A step is the product's: `TorchBackend.step` with GRPO,
clipping and AdamW.

- `padded`: microbatches in order of length, padded on the right.
- `packed`: samples one after the other in one row.
- `packed, shared prompts`: what the samples of a group begin with is computed once.
- `trl`: TRL's GRPO loss and its own forward pass, in four microbatches of 8, all padded to the longest episode, as its
  trainer makes them; the same optimizer. Before anything is timed, its gradients are compared with ours.
- `trl, trimmed`: the same with a group in each microbatch, padded to its own longest, which TRL does not do.

Fraction of peak: floating-point operations of matrix products and attention *as each system executes them*, backward
twice forward, recomputation and elementwise work not counted, over CPU time and over the peak. The peak is the best of
`PEAK_SHAPES` by torch.mm, measured before each step. `useful_fraction` counts for every system what the episodes need
without sharing and without padding. Systems take turns, repetition by repetition; figures are medians.

Memory: what a step adds to the largest resident size of a process of its own, after a small step has made optimizer
state and buffers, for each token of the episodes.

The ratio is the fraction of peak with shared prompts; it holds when it and that of `packed` reach their targets, and
tokens per second with shared prompts are `TRL_TARGET` times those of `trl, trimmed`, which flatters TRL, in the median
of the repetitions.
"""

import argparse
import importlib.metadata
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import trl_peer
from common import Row, absent, result, row_of, table
from transformers import LlamaConfig, LlamaForCausalLM

from headrace import __version__
from headrace.platform.config import GrpoConfig, LearnerConfig
from headrace.platform.records import f32, i32
from headrace.trainer.algorithms import Grpo
from headrace.trainer.backends.torch import TorchBackend
from headrace.trainer.batch import MicroBatch, pack
from headrace.trainer.packing import PackedBatch
from headrace.trainer.samples import Sample

PACKED_TARGET, SHARED_TARGET, TRL_TARGET = 0.72, 0.78, 4.0
EQUAL = 1e-5
"""Largest difference of a parameter's gradient from TRL's, over its norm, that counts as rounding."""
LAYERS, WIDTH, HEADS, INNER, VOCABULARY = 4, 256, 4, 688, 512
GROUPS, MEMBERS, SHORTEST, LONGEST = 4, 8, 50, 1500
MICROBATCH_TOKENS = 4096
PEAK_SHAPES = ((4096, 256, 688), (4096, 688, 256), (4096, 1024, 1024), (1024, 1024, 1024))
SYSTEMS = ("padded", "packed", "packed, shared prompts")
TRL_SYSTEMS = ("trl", "trl, trimmed")
TRL_REPEATS = 3
"""A step of TRL's takes ten times as long: it is left out of later turns."""


def new_model() -> LlamaForCausalLM:
    """The same weights for every system."""
    torch.manual_seed(0)
    shape = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
    ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(**shape, **ends, num_attention_heads=HEADS, tie_word_embeddings=False))


class PaddedBackend(TorchBackend):
    """The product's backend as it treats a model that cannot be packed."""

    def _microbatches(self, batch: Sequence[Sample]) -> list[MicroBatch]:
        return pack(batch, MICROBATCH_TOKENS)


class OurStep:
    """An optimizer step of the product over `given`."""

    def __init__(self, system: str, given: Sequence[Sample]) -> None:
        config = LearnerConfig(threads=1, microbatch_tokens=MICROBATCH_TOKENS, share_prefixes=system == SYSTEMS[2])
        kind = PaddedBackend if system == "padded" else TorchBackend
        self.backend = kind(new_model(), config)
        self._given, self._algorithm = given, Grpo(GrpoConfig())

    def __call__(self) -> None:
        """The step."""
        self.backend.step(self._given, self._algorithm)

    def small(self) -> None:
        """A step over the two shortest: it makes what stays."""
        self.backend.step(sorted(self._given, key=lambda sample: sample.length)[:2], self._algorithm)

    def executed(self) -> float:
        """Operations of a step; of a causal square its half."""
        return sum(executed(batch) for batch in self.backend._microbatches(self._given))


class TheirStep(trl_peer.TrlStep):
    """A step of TRL's over `given`: every position of every row goes through the output layer, and attention with a
    mask of padding is computed as a whole square."""

    def __init__(self, system: str, given: Sequence[Sample]) -> None:
        super().__init__(new_model(), given, MEMBERS, LONGEST, trimmed=system == TRL_SYSTEMS[1])

    def executed(self) -> float:
        """Operations of a step."""
        return sum(operations(rows * length, rows * length**2, rows * (length - 1)) for rows, length in self.shapes)


def step_of(system: str, given: Sequence[Sample]) -> "OurStep | TheirStep":
    """A step of the system over `given`, to be taken again and again."""
    return TheirStep(system, given) if system in TRL_SYSTEMS else OurStep(system, given)


def gradients_apart(given: Sequence[Sample]) -> float:
    """The largest difference of a parameter's gradient between TRL and ours, packed with shared prompts, over its
    norm."""
    theirs, ours = TheirStep(TRL_SYSTEMS[0], given), OurStep(SYSTEMS[2], given)
    theirs.gradients()
    found: dict[str, torch.Tensor] = {}
    for name, parameter in ours.backend.model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda one, name=name: found.update({name: one.grad.clone()}))
    ours()
    return max(float((found[n] - p.grad).norm() / p.grad.norm()) for n, p in theirs.model.named_parameters())


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


def executed(batch: MicroBatch | PackedBatch) -> float:
    """What a microbatch computes; of a causal square its half."""
    chosen = int(batch.loss_mask.sum())
    if isinstance(batch, MicroBatch):
        rows, length = batch.token_ids.shape[0], batch.token_ids.shape[1] - 1
        return operations(rows * length, rows * length**2 / 2, chosen)
    pairs = sum((p.last - p.first) * (p.key_last - p.key_first) * (0.5 if p.causal else 1.0) for p in batch.parts)
    return operations(len(batch.token_ids), pairs, chosen)


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
    step = step_of(system, episodes())
    step.small()
    before = largest_resident()
    step()
    return largest_resident() - before


def largest_resident() -> int:
    """Bytes; of this program alone, while getrusage also has what the parent had when it started this one."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def measured_memory(system: str) -> int:
    """`memory` in a child process."""
    done = subprocess.run([sys.executable, __file__, "--memory-of", system], capture_output=True, text=True, check=True)
    return int(done.stdout.strip().splitlines()[-1])


def measure(given: Sequence[Sample], systems: Sequence[str], repeats: int) -> dict[str, "Measured"]:
    """The systems take turns; a step of each that is not counted warms up."""
    steps = {system: step_of(system, given) for system in systems}
    found = {system: Measured(gflop=step.executed() / 1e9) for system, step in steps.items()}
    for repeat in range(repeats + 1):
        for system, step in steps.items():
            if system in TRL_SYSTEMS and repeat > TRL_REPEATS:
                continue
            limit, began = peak(), time.process_time()
            step()
            if repeat:
                found[system].seconds.append(time.process_time() - began)
                found[system].peaks.append(limit / 1e9)
    return found


@dataclass(slots=True)
class Measured:
    """Of one system: what a step executes, the CPU seconds of each, and the peak before each in GFLOP per second."""

    gflop: float
    seconds: list[float] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)

    def of_peak(self, gflop: float) -> list[float]:
        """The fraction of the peak that doing `gflop` in each step's time is."""
        return [gflop / seconds / limit for seconds, limit in zip(self.seconds, self.peaks, strict=True)]


def row(system: str, found: Measured, needed: float, tokens: int) -> Row:
    """`needed` is in GFLOP."""
    extra = {
        "tokens_per_cpu_s": round(statistics.median(tokens / seconds for seconds in found.seconds)),
        "useful_fraction": round(statistics.median(found.of_peak(needed)), 3),
        "gflop": round(found.gflop, 1),
        "peak_gflop_per_s": round(statistics.median(found.peaks), 1),
        "memory_kb_per_token": round(measured_memory(system) / tokens / 1e3, 1),
    }
    version = importlib.metadata.version("trl") if system in TRL_SYSTEMS else __version__
    return row_of(system, version, "of peak", found.of_peak(found.gflop), **extra)


def main() -> None:
    """Measure, print a table, and with --json one object on the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--memory-of", choices=SYSTEMS + TRL_SYSTEMS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.memory_of:
        sys.stdout.write(f"{memory(arguments.memory_of)}\n")
        return
    given, with_trl = episodes(), trl_peer.load() is not None
    tokens, chosen = sum(s.length for s in given), sum(s.loss_tokens for s in given)
    needed = operations(tokens, sum(s.length**2 / 2 for s in given), chosen) / 1e9
    facts: dict[str, object] = {"packed_target": PACKED_TARGET, "tokens": tokens, "loss_tokens": chosen}
    if with_trl:
        facts["gradients_apart"] = apart = gradients_apart(given)
        if apart > EQUAL:
            raise SystemExit(f"the gradients differ from TRL's by {apart:.1e} of their norm: nothing to compare")
    found = measure(given, SYSTEMS + (TRL_SYSTEMS if with_trl else ()), arguments.repeats)
    rows = [row(system, measured, needed, tokens) for system, measured in found.items()]
    rows += [] if with_trl else [absent(system, "of peak") for system in TRL_SYSTEMS]
    packed, shared = rows[1].figure or 0.0, rows[2].figure or 0.0
    facts["packed"] = packed
    sys.stdout.write(f"{table(rows)}\n{len(given)} episodes, {tokens} tokens, {chosen} in the loss\n")
    sys.stdout.write(f"fraction of peak: packed {packed:.3f} (target {PACKED_TARGET}), ")
    sys.stdout.write(f"with shared prompts {shared:.3f} (target {SHARED_TARGET})\n")
    holds = packed >= PACKED_TARGET and shared >= SHARED_TARGET
    if with_trl:
        for system in TRL_SYSTEMS:
            pairs = zip(found[system].seconds, found[SYSTEMS[2]].seconds, strict=False)
            faster = sorted(theirs / ours for theirs, ours in pairs)
            key = "tokens_over_" + system.replace(", ", "_")
            facts[key] = [round(x, 2) for x in (statistics.median(faster), faster[0], faster[-1])]
            sys.stdout.write(f"{key}: {facts[key]} (median, least, most; target {TRL_TARGET})\n")
        holds = holds and statistics.median(faster) >= TRL_TARGET
    if arguments.json:
        sys.stdout.write(result("learner_ragged", shared, SHARED_TARGET, holds, rows, **facts) + "\n")


if __name__ == "__main__":
    main()
