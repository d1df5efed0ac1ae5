"""An evaluation as it is kept, and its figures as programs read them: for metrics, and for `--json`."""

from collections.abc import Iterable
from typing import Any

import msgspec

from headrace.platform.evaluation.summary import EvaluationSummary, Figures, summarize
from headrace.platform.observability.metrics import Value
from headrace.platform.observability.names import Metric
from headrace.platform.records.evaluation import EpisodeOutcome, Evaluation


def evaluation_of(
    outcomes: Iterable[EpisodeOutcome],
    *,
    name: str,
    run: str,
    model: str,
    version: int | None,
    split: str,
    tasks: int,
    samples: int,
    created_at_s: float,
    digests: dict[str, str],
) -> Evaluation:
    """The record of an evaluation, its outcomes in an order that does not depend on who played them.

    `tasks` is how many were asked for; the record says how many there were to play.
    """
    ordered = sorted(outcomes, key=lambda each: (each.environment, each.task_id, each.seed, each.sample))
    return Evaluation(
        name=name,
        run=run,
        model=model,
        version=version,
        split=split,
        tasks=min(tasks, len(ordered) // samples),
        samples=samples,
        created_at_s=created_at_s,
        digests=digests,
        outcomes=tuple(ordered),
    )


def summary_line(evaluation: Evaluation) -> dict[Metric, Value]:
    """The figures for metrics; the interval is that of the mean score. What was not measured is left out."""
    summary = summarize(evaluation)
    overall = summary.overall
    line: dict[Metric, Value] = {
        Metric.EVAL_UNSCORED: overall.unscored,
        Metric.EVAL_PASS_HAT: {str(k): value for k, value in overall.pass_hat.items()},
        Metric.EVAL_BY_ENVIRONMENT: {
            name: figures.mean_score.mean for name, figures in summary.environments.items() if figures.mean_score
        },
    }
    if overall.success is not None:
        line[Metric.EVAL_SUCCESS] = overall.success.mean
    if overall.mean_score is not None:
        line[Metric.EVAL_SCORE] = overall.mean_score.mean
        if (ends := overall.mean_score.ends) is not None:
            line[Metric.EVAL_LOW], line[Metric.EVAL_HIGH] = ends
    return line


def evaluation_facts(evaluation: Evaluation, summary: EvaluationSummary) -> dict[str, Any]:
    """The evaluation and its summary as one JSON-safe object; intervals as [low, high], null where not measured."""
    return {
        "name": evaluation.name,
        "run": evaluation.run,
        "model": evaluation.model,
        "version": evaluation.version,
        "split": evaluation.split,
        "samples": evaluation.samples,
        "created_at_s": evaluation.created_at_s,
        "digests": evaluation.digests,
        **_figures(summary.overall),
        "environments": {name: _figures(figures) for name, figures in summary.environments.items()},
    }


def _figures(figures: Figures) -> dict[str, Any]:
    success, score, recovery = figures.success, figures.mean_score, figures.recovery
    return {
        "tasks": figures.tasks,
        "episodes": figures.episodes,
        "scored": figures.scored,
        "unscored": figures.unscored,
        "success": success.mean if success else None,
        "success_interval": success.ends if success else None,
        "mean_score": score.mean if score else None,
        "mean_score_interval": score.ends if score else None,
        "pass_at": {str(k): value for k, value in figures.pass_at.items()},
        "pass_hat": {str(k): value for k, value in figures.pass_hat.items()},
        "episode_s": msgspec.to_builtins(figures.episode_s),
        "tool_s": msgspec.to_builtins(figures.tool_s),
        "turns": figures.turns,
        "sampled_tokens": figures.sampled_tokens,
        "errors": figures.errors,
        "statuses": figures.statuses,
        "fault": figures.fault,
        "struck": figures.struck,
        "recovery": recovery.mean if recovery else None,
        "recovery_interval": recovery.ends if recovery else None,
        "safety": figures.safety.facts(),
    }
