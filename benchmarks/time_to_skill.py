"""From the same checkpoint to 0.9 sampled success on `lookup`: headrace in process against TRL's GRPO trainer.

Both: the recipe's model after its supervised stages, 16 tasks of 8 episodes a step, GRPO's token loss with clip 0.2 and
0.28, AdamW with the recipe's rate, betas and 5 warm-up steps, clipping at 1, temperature 1, 16 new tokens a turn, 4
turns; one thread.

- `headrace`: `train` as a user's `runtime.kind=inprocess` runs it, with every record that it writes. Groups of equal
  scores are replaced by others, which is the product's way to fill a batch.
- `trl`: `GRPOTrainer.train`. It plays several turns through `rollout_func`, its own door for that, with the world of
  lookup_play.py and the trainer's own generation (transformers.generate on the whole context of each turn, one padded
  batch of 128). Its tool loop would do the same, and needs a response template of each tokenizer. What is a hack: that
  generation is a private method of the trainer.

After every step the clock stops, and the weights play 256 tasks of the dev split, the same ones, once each. A run is
over at the first step that reaches 0.9. Loading, the first measurement and what comes after are not counted. Each run
is a process of its own; the systems take turns, seed by seed.

The ratio is headrace's wall time over TRL's, the median over seeds; it holds when it is at most `TARGET` and all runs
reached 0.9.
"""

import argparse
import asyncio
import contextlib
import importlib.metadata
import io
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import trl_peer
from common import Row, absent, cpu_s, result, row_of, table
from lookup_play import NEW_TOKENS, play, success
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback

from headrace import __version__
from headrace.actors.environments.lookup import LookupTasks
from headrace.actors.rendering import load_renderer
from headrace.deploy.base_model import prepare_base_model
from headrace.deploy.progress import PlainProgress, RunState
from headrace.deploy.runtime_inprocess import InprocessRuntime
from headrace.deploy.train import create_run, train
from headrace.platform.config import RunConfig
from headrace.platform.config.load import load_recipe
from headrace.trainer.report import StepReport

SKILL, TARGET = 0.9, 0.5
MEASURED_TASKS = 256
RECIPES = Path(__file__).resolve().parent.parent / "deploy" / "recipes"


class _Reached(Exception):
    """The run is over."""


@dataclass(slots=True)
class Clock:
    """Wall and CPU seconds of learning, stopped while the policy is measured."""

    folder: Path
    steps: int
    curve: list[float] = field(default_factory=list)
    wall_s: float = 0.0
    cpu_s: float = 0.0
    _began: tuple[float, float] = (0.0, 0.0)

    def start(self) -> None:
        """Learning begins, or goes on."""
        self._began = (time.perf_counter(), cpu_s())

    def measure(self, load: Callable[[], Any]) -> bool:
        """Stop, see how good the model is that `load` gives, go on; whether the run is over."""
        self.wall_s += time.perf_counter() - self._began[0]
        self.cpu_s += cpu_s() - self._began[1]
        state = torch.get_rng_state()
        torch.manual_seed(len(self.curve))
        tasks = LookupTasks("dev", 0).next(MEASURED_TASKS)
        model = load().eval()
        self.curve.append(round(success(load_renderer(self.folder), tasks, model), 4))
        torch.set_rng_state(state)
        self.start()
        return self.curve[-1] >= SKILL or len(self.curve) >= self.steps

    def report(self) -> dict[str, Any]:
        """What the parent process reads."""
        return {"wall_s": round(self.wall_s, 2), "cpu_s": round(self.cpu_s, 2), "curve": self.curve}


class MeasuredRuntime(InprocessRuntime):
    """Measures the newest version after each step."""

    clock: Clock

    async def start_rollouts(self) -> None:
        """Learning begins."""
        await super().start_rollouts()
        self.clock.start()

    async def step(self) -> StepReport:
        """A step, then a measurement; ends the run by an exception."""
        report = await super().step()
        _, path = await self._registry.open(report.version)
        if self.clock.measure(lambda: LlamaForCausalLM.from_pretrained(path)):
            raise _Reached
        return report


def recipe(model: Path | None, seed: int, *changes: str) -> RunConfig:
    """`lookup` from the folder `model`, or from what its supervised stages make."""
    folder = ["model.tiny_llama=null", "sft=null", f"model.path={model}"] if model else []
    return load_recipe("lookup", [*folder, f"seed={seed}", "runtime.kind=inprocess", *changes], RECIPES)


def play_headrace(folder: Path, seed: int, steps: int) -> Clock:
    """A run of the product."""
    with tempfile.TemporaryDirectory() as runs:
        config = recipe(folder, seed, f"runs_dir={runs}", f"learner.steps={steps + 1}", "eval.tasks=8")
        context, root = create_run(config)
        runtime, state = MeasuredRuntime(context), RunState(context.run)
        runtime.clock = Clock(folder, steps)
        with contextlib.suppress(_Reached):
            asyncio.run(train(context, root, runtime, state, PlainProgress(state, io.StringIO())))
        return runtime.clock


class MeasuredTraining(TrainerCallback):
    """Measures TRL's model after each step."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Learning begins."""
        self._clock.start()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """A measurement; ends the run when it is over."""
        control.should_training_stop = self._clock.measure(lambda: model)
        model.train()


def play_trl(folder: Path, seed: int, steps: int) -> Clock:
    """A run of TRL's trainer over the same tasks in the same order."""
    learner, renderer = recipe(folder, seed).learner, load_renderer(folder)
    group = learner.algorithm.group_size
    batch = learner.batch_groups * group
    tasks = LookupTasks("train", seed).next(steps * learner.batch_groups)
    model = LlamaForCausalLM.from_pretrained(folder)
    clock = Clock(folder, steps)

    def rollout(prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        plays = play(
            renderer,
            [tasks[int(prompt)] for prompt in prompts],
            lambda contexts: trainer._generate_single_turn(contexts, None, {}, group)[0],
        )
        return {
            "prompt_ids": [one.prompt for one in plays],
            "completion_ids": [one.completion for one in plays],
            "env_mask": [one.mask for one in plays],
            "logprobs": None,
            "earned": [one.reward for one in plays],
        }

    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learner.lr, betas=learner.betas, weight_decay=learner.weight_decay
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / learner.warmup))
    with tempfile.TemporaryDirectory() as out:
        trainer = trl_peer.grpo_trainer(
            model,
            PreTrainedTokenizerFast.from_pretrained(folder),
            out,
            lambda completions, earned, **_: earned,
            [str(number) for number in range(len(tasks))],
            rollout_func=rollout,
            callbacks=[MeasuredTraining(clock)],
            optimizers=(optimizer, schedule),
            seed=seed,
            max_steps=steps,
            per_device_train_batch_size=batch,
            num_generations=group,
            max_completion_length=NEW_TOKENS,
            shuffle_dataset=False,
            max_grad_norm=learner.clip_grad,
            epsilon=learner.algorithm.clip_low,
            epsilon_high=learner.algorithm.clip_high,
            loss_type="dapo",
            save_strategy="no",
            logging_strategy="no",
        )
        trainer.train()
    return clock


SYSTEMS = {"headrace": play_headrace, "trl": play_trl}


def measured(system: str, folder: Path, seed: int, steps: int) -> dict[str, Any]:
    """A run in a process of its own."""
    command = [sys.executable, __file__, "--play", system, "--seeds", str(seed), "--model", str(folder)]
    done = subprocess.run([*command, "--steps", str(steps)], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def row(system: str, version: str, runs: Sequence[dict[str, Any]]) -> Row:
    """Wall seconds over seeds."""
    extra = {
        "cpu_s": round(statistics.median(run["cpu_s"] for run in runs), 1),
        "steps": [len(run["curve"]) for run in runs],
        "success": [run["curve"][-1] for run in runs],
    }
    return row_of(system, version, "s", [run["wall_s"] for run in runs], **extra)


def main() -> None:
    """Measure, print a table, and with --json one object on the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60, help="give up after so many")
    parser.add_argument("--model", type=Path, help="start from this folder, not from the recipe's own stages")
    parser.add_argument("--play", choices=SYSTEMS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.play:
        clock = SYSTEMS[arguments.play](arguments.model, arguments.seeds[0], arguments.steps)
        sys.stdout.write(json.dumps(clock.report()) + "\n")
        return
    folder = arguments.model or prepare_base_model(recipe(None, 0), lambda _: None).path
    systems = ["headrace", "trl"] if trl_peer.load() is not None else ["headrace"]
    runs: dict[str, list[dict[str, Any]]] = {system: [] for system in systems}
    for seed in arguments.seeds:
        for system in systems:
            runs[system].append(measured(system, folder, seed, arguments.steps))
    rows = [row("headrace", __version__, runs["headrace"])]
    ratio, cpu_ratio = 0.0, 0.0
    if "trl" in runs:
        rows.append(row("trl", importlib.metadata.version("trl"), runs["trl"]))
        pairs = list(zip(runs["headrace"], runs["trl"], strict=True))
        ratio = statistics.median(ours["wall_s"] / theirs["wall_s"] for ours, theirs in pairs)
        cpu_ratio = statistics.median(ours["cpu_s"] / theirs["cpu_s"] for ours, theirs in pairs)
    else:
        rows.append(absent("trl", "s"))
    reached = all(run["curve"][-1] >= SKILL for each in runs.values() for run in each)
    sys.stdout.write(f"{table(rows)}\nheadrace over TRL: wall {ratio:.2f}, CPU {cpu_ratio:.2f} (target {TARGET})\n")
    if arguments.json:
        holds = reached and 0 < ratio <= TARGET
        curves = {system: [run["curve"] for run in each] for system, each in runs.items()}
        facts = {"cpu_ratio": round(cpu_ratio, 3), "reached": reached, "curves": curves}
        sys.stdout.write(result("time_to_skill", ratio, TARGET, holds, rows, **facts) + "\n")


if __name__ == "__main__":
    main()
