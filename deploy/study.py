"""Studies: the same recipe run under several conditions and seeds, and what became of each.

Every run is a `headrace train` of its own, in a process of its own, and leaves its run root under the study's folder,
where `headrace inspect` and `headrace compare` find it. All begin with the same weights: supervised stages are run, or
found in the cache, once. What is done already is not done again: a study that was interrupted goes on. Owns which runs
a study has and the reading of their curves; drawing is platform/observability/study_figure.py.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.deploy.base_model import prepare_base_model
from headrace.platform.config import RunConfig
from headrace.platform.config.load import load_recipe
from headrace.platform.errors import ConfigError, RunFailed
from headrace.platform.observability.metrics import read_metrics
from headrace.platform.observability.names import Metric
from headrace.platform.observability.study_figure import draw_study

RUN_DEADLINE_S = 3600.0
GOAL = 0.9
SMOOTHING = 3
"""Learner steps that a curve's point is the mean of, before it is compared with the goal."""

CREDIT: Mapping[str, tuple[str, ...]] = {
    "grpo": ("learner.algorithm.name=grpo",),
    "rloo": ("learner.algorithm.name=rloo",),
    "ppo": ("learner.algorithm.name=ppo",),
    "reinforce": ("learner.algorithm.name=reinforce",),
}
LAGS: Mapping[str, tuple[str, ...]] = {f"lag {limit}": (f"queue.max_lag={limit}",) for limit in (0, 1, 2, 4, 8)}


class Point(msgspec.Struct, frozen=True):
    """Success of the episodes put lately, at a learner step, and the seconds since the first record of the run."""

    step: int
    seconds: float
    success: float


class StudiedRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a study. `before` and `after` are evaluations; `steps_to_goal` and `seconds_to_goal` say when the
    curve, as means of three steps, first reached 0.9: None where it did not."""

    condition: str
    seed: int
    root: str
    before: float
    after: float
    curve: tuple[Point, ...]
    steps_to_goal: int | None
    seconds_to_goal: float | None


class Study(msgspec.Struct, frozen=True, kw_only=True):
    """A recipe, the conditions that it was run under (as overrides), and the runs that are done."""

    name: str
    recipe: str
    conditions: dict[str, tuple[str, ...]]
    runs: tuple[StudiedRun, ...] = ()

    def of(self, condition: str) -> list[StudiedRun]:
        """The runs of one condition, by seed."""
        return sorted((run for run in self.runs if run.condition == condition), key=lambda run: run.seed)


def run_study(
    name: str,
    recipe: str,
    recipes: Path,
    conditions: Mapping[str, Sequence[str]],
    *,
    seeds: Sequence[int],
    changes: Sequence[str],
    out: Path,
    on_run: Callable[[str, int], None] = lambda condition, seed: None,
) -> Study:
    """Run what is not done yet; writes `out/NAME.json` after each run, and `out/NAME.png` at the end.

    Args:
        name: of the study's files.
        recipe: what is run.
        recipes: the folder of named recipes.
        conditions: overrides by the name of the condition.
        seeds: each condition is run with each; they change tasks and sampling, not the weights that a run begins with.
        changes: overrides for all runs.
        out: the study's folder.
        on_run: called before each run.

    Raises:
        ConfigError: a condition, or what `out` holds, does not fit.
        RunFailed: a run ended early; what was done stays.
    """
    config = load_recipe(recipe, changes, recipes)
    _check_own(conditions, changes)
    for overrides in conditions.values():
        load_recipe(recipe, [*changes, *overrides], recipes)
    wanted = {condition: (*changes, *overrides) for condition, overrides in conditions.items()}
    study = _begun(out / f"{name}.json", Study(name=name, recipe=recipe, conditions=wanted))
    same_start = _same_start(config)
    for condition, seed in _missing(study, conditions, seeds):
        on_run(condition, seed)
        given = [*study.conditions[condition], *same_start, f"seed={seed}", f"runs_dir={out / 'runs'}"]
        study = msgspec.structs.replace(study, runs=(*study.runs, _run(recipe, given, condition, seed)))
        _write(out / f"{name}.json", study)
    curves = {c: [[(p.step, p.seconds, p.success) for p in run.curve] for run in study.of(c)] for c in study.conditions}
    draw_study(curves, str(out / f"{name}.png"), goal=GOAL, title=f"{recipe}: {name}")
    return study


def goal_reached(curve: Sequence[Point]) -> Point | None:
    """The first point at which the mean of the last three is at least the goal."""
    for end in range(SMOOTHING, len(curve) + 1):
        if sum(point.success for point in curve[end - SMOOTHING : end]) / SMOOTHING >= GOAL:
            return curve[end - 1]
    return None


def _check_own(conditions: Mapping[str, Sequence[str]], changes: Sequence[str]) -> None:
    """Refuse to be told what differs between the runs. Raises ConfigError."""
    own = {"seed", "runs_dir", *(override.partition("=")[0] for each in conditions.values() for override in each)}
    if told := [change for change in changes if change.partition("=")[0] in own]:
        raise ConfigError(f"{', '.join(told)}: the study itself sets {', '.join(sorted(own))}; leave that out")


def _begun(path: Path, wanted: Study) -> Study:
    """The study as far as it is done."""
    if not path.exists():
        return wanted
    done = msgspec.json.decode(path.read_bytes(), type=Study)
    changed = [c for c, overrides in wanted.conditions.items() if done.conditions.get(c, overrides) != overrides]
    if done.recipe != wanted.recipe or changed:
        raise ConfigError(
            f"{path} holds another study ({done.recipe}; {', '.join(changed) or 'another recipe'} differs); give"
            " another --out, or remove it"
        )
    return msgspec.structs.replace(done, conditions={**done.conditions, **wanted.conditions})


def _missing(study: Study, conditions: Iterable[str], seeds: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Seed by seed, so that an early look compares all conditions."""
    done = {(run.condition, run.seed) for run in study.runs}
    yield from ((c, seed) for seed in seeds for c in conditions if (c, seed) not in done)


def _same_start(config: RunConfig) -> list[str]:
    if config.sft is None and config.model.tiny_llama is None:
        return []
    return ["sft=null", "model.tiny_llama=null", f"model.path={prepare_base_model(config, lambda step: None).path}"]


def _run(recipe: str, changes: Sequence[str], condition: str, seed: int) -> StudiedRun:
    command = [sys.executable, "-c", "from headrace.deploy.cli import main; main()", "train", recipe, "--json"]
    try:
        done = subprocess.run([*command, *changes], capture_output=True, text=True, timeout=RUN_DEADLINE_S)
    except subprocess.TimeoutExpired:
        raise RunFailed(f"{condition}, seed {seed}: no end after {RUN_DEADLINE_S:.0f} s") from None
    if done.returncode:
        words = done.stderr.strip().splitlines() or ["it said nothing"]
        raise RunFailed(f"{condition}, seed {seed}, exit code {done.returncode}: {words[-1]}")
    summary: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    curve = read_curve(f"{summary['root']}/metrics.jsonl")
    reached = goal_reached(curve)
    return StudiedRun(
        condition=condition,
        seed=seed,
        root=summary["root"],
        before=summary["success_before"],
        after=summary["success_after"],
        curve=curve,
        steps_to_goal=reached.step if reached else None,
        seconds_to_goal=reached.seconds if reached else None,
    )


def read_curve(metrics_url: str) -> tuple[Point, ...]:
    """Success by learner step; seconds count from the first learner step's beginning, as far as the records tell."""
    records = [record for record in read_metrics(metrics_url) if record.get(Metric.LOSS) is not None]
    if not records:
        return ()
    first = records[0]
    began_s = first[Metric.TIME_S] - first[Metric.LEARNER_BUSY_S] - first[Metric.LEARNER_WAIT_S]
    return tuple(
        Point(record[Metric.LEARNER_STEP], record[Metric.TIME_S] - began_s, record[Metric.SUCCESS])
        for record in records
        if record.get(Metric.SUCCESS) is not None
    )


def _write(path: Path, study: Study) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(study)))
