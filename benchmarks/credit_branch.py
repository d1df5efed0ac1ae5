"""What credit by continuations buys: `branch` against GRPO and RLOO at equal environment steps, in process.

All begin from the same checkpoint (the recipe's supervised stages, cached, or `--model`) and play the recipe
`lookup-hops`: chains of reads, one decision after another, one reward at the end. The horizontal axis is environment
steps *executed*, dropped episodes included; what continuations do again of their trunk to come to where they begin is
counted apart (`again`). Every run is evaluated on the same dev tasks; curves are straight lines between evaluations.

Given for each: the score over the seeds after all, half, a quarter and an eighth of the steps that the shortest run
executed, and how many steps each took to `--score`, over the seeds that came to it, without and with those done again.
`ratio` is the steps of GRPO in groups of 8 over those of branch, medians, nothing done again counted. Nothing is
promised about it, so `holds` says only that all runs came to an end.
"""

import argparse
import asyncio
import io
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from common import Row, result, row_of, table

from headrace import __version__
from headrace.deploy.base_model import prepare_base_model
from headrace.deploy.credit_curves import CurvePoint, credit_curve, score_at, steps_to
from headrace.deploy.progress import PlainProgress, RunState
from headrace.deploy.runtime_inprocess import InprocessRuntime
from headrace.deploy.train import create_run, train
from headrace.platform.config.load import load_recipe

RECIPES = Path(__file__).resolve().parents[1] / "deploy" / "recipes"
VARIANTS = {
    "grpo": ("learner.algorithm={name: grpo, group_size: 8}",),
    "grpo-5": ("learner.algorithm={name: grpo, group_size: 5}",),
    "rloo": ("learner.algorithm={name: rloo, group_size: 8}",),
    "branch": ("learner.algorithm={name: branch, group_size: 7, points: 3, continuations: 2}",),
}
"""Overrides that make a variant of the recipe. A group of `grpo-5` executes about as many steps as one of branch."""
CLOSELY = ("learner.lr=5e-4", "learner.steps=14", "learner.batch_groups=4", "eval.tasks=128", "eval.every=1")
"""Small steps and many evaluations: the task is learned in a thousand environment steps."""
PATIENT = (
    "runtime.kind=inprocess",
    "environments.0.budgets.max_seconds=36000",
    "environments.0.step_deadline_s=3600",
    "environments.0.reset_deadline_s=3600",
    "serving.request_deadline_s=3600",
    "queue.group_deadline_s=36000",
    "learner.batch_deadline_s=36000",
)
"""A busy machine ends no episode: what counts is steps, not time."""
Curves = dict[str, list[list[CurvePoint]]]


def play(model: Path, runs_dir: str, seed: int, changes: list[str]) -> list[CurvePoint]:
    """Train once; the curve of the run."""
    fixed = [f"model.path={model}", "model.tiny_llama=null", "sft=null", *PATIENT]
    config = load_recipe("lookup-hops", [*fixed, f"runs_dir={runs_dir}", f"seed={seed}", *changes], RECIPES)
    context, root = create_run(config)
    state = RunState(context.run)
    asyncio.run(train(context, root, InprocessRuntime(context), state, PlainProgress(state, io.StringIO())))
    return credit_curve(root)


def rows_of(curves: Curves, score: float) -> tuple[list[Row], float]:
    """The table, and GRPO's environment steps to `score` over those of branch (0 where either never came to it)."""
    budget = min(curve[-1].executed for runs in curves.values() for curve in runs)
    rows, medians = [], {}
    for name, runs in curves.items():
        for share in (0.125, 0.25, 0.5, 1.0):
            steps = round(share * budget)
            rows.append(row_of(name, __version__, f"score at {steps}", [score_at(curve, steps) for curve in runs]))
        whole = [[replace(point, executed=point.executed + point.again) for point in curve] for curve in runs]
        for unit, counted in (("steps", runs), ("steps, those done again too,", whole)):
            reached = [found for curve in counted if (found := steps_to(curve, score)) is not None]
            if reached:
                told = f"{len(reached)} of {len(runs)}"
                rows.append(row_of(name, __version__, f"{unit} to {score:g}", reached, seeds=told))
                medians.setdefault(name, statistics.median(reached))
    return rows, medians["grpo"] / medians["branch"] if {"grpo", "branch"} <= set(medians) else 0.0


def main() -> None:
    """Train all variants with all seeds, print a table, and with --json one object on the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--model", type=Path, help="a checkpoint to begin from; default: the recipe's own, cached")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--score", type=float, default=0.9)
    parser.add_argument("--set", nargs="*", default=[], help="recipe overrides for all, such as learner.steps=20")
    arguments = parser.parse_args()
    base = arguments.model or prepare_base_model(load_recipe("lookup-hops", [], RECIPES), lambda step: None).path
    curves: Curves = {name: [] for name in arguments.variants}
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        for seed in arguments.seeds:
            for name in arguments.variants:
                curve = play(base, folder, seed, [*VARIANTS[name], *CLOSELY, *arguments.set])
                curves[name].append(curve)
                shown = " ".join(f"{point.executed}:{point.score:.3f}" for point in curve)
                sys.stdout.write(f"{name} seed {seed} ({curve[-1].again} done again): {shown}\n")
                sys.stdout.flush()
    rows, ratio = rows_of(curves, arguments.score)
    sys.stdout.write(table(rows) + "\n")
    if arguments.json:
        points = {name: [[[p.executed, p.score] for p in curve] for curve in runs] for name, runs in curves.items()}
        sys.stdout.write(result("credit_branch", ratio, 0.0, True, rows, curves=points) + "\n")


if __name__ == "__main__":
    main()
