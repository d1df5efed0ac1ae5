"""`headrace eval`: how good a version of a run, or a model folder, is on evaluation tasks."""

import asyncio
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from headrace.deploy.cli.compare import print_comparison
from headrace.deploy.cli.options import Json, Overrides, RunsDir, answer_json, recipes_dir

if TYPE_CHECKING:
    from headrace.platform.evaluation.comparison import Comparison
    from headrace.platform.evaluation.summary import EvaluationSummary, Figures, Percentiles
    from headrace.platform.records.evaluation import Evaluation
    from headrace.platform.store.run_root import RunRoot

_SHORTEST_S = 0.001

Name = Annotated[
    str,
    typer.Argument(
        metavar="RUN|MODEL",
        help="A run (its name, any unique prefix of it, or its path), or a Hugging Face folder.",
        show_default=False,
    ),
]


def evaluate(
    name: Name,
    overrides: Overrides = None,
    version: Annotated[str, typer.Option(help="Of a run: a number, `latest`, or `best`. Default: latest.")] = "",
    split: Annotated[str, typer.Option(help="dev or hidden. Default: the recipe's eval.split.")] = "",
    tasks: Annotated[int | None, typer.Option(help="Default: the recipe's eval.tasks.")] = None,
    samples: Annotated[int | None, typer.Option(help="Episodes per task. Default: the recipe's eval.samples.")] = None,
    seed: Annotated[int | None, typer.Option(help="Draws other tasks. Default: the recipe's.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Default: the recipe's, per environment.")] = None,
    recipe: Annotated[
        str, typer.Option(help="On what to evaluate: a recipe or ./file.py:Name. Default for a run: its own.")
    ] = "",
    against: Annotated[
        str, typer.Option(help="Compare with this stored evaluation: RUN, RUN@NAME, RUN@VERSION, RUN@best or a file.")
    ] = "",
    runs_dir: RunsDir = "runs",
    as_json: Json = False,
) -> None:
    """Measure success on tasks that training does not play. Try: headrace eval RUN --samples 4

    Plays the same tasks under the same seeds every time, stores episodes, rewards and the evaluation in the run, and
    prints success with a 95 % bootstrap interval, pass@k and pass^k. A model folder gets a run root of its own, and so
    does a run in other worlds: on another --recipe, or where KEY=VALUE changes environments, tasks or scorers.
    """
    from headrace.deploy.evaluate import EvaluationRequest, prepare
    from headrace.deploy.evaluate import evaluate as carry_out
    from headrace.platform.errors import RunFailed
    from headrace.platform.evaluation.record import evaluation_facts
    from headrace.platform.evaluation.summary import summarize
    from headrace.platform.store.evaluations import find_evaluation

    request = EvaluationRequest(
        name=name,
        version=version,
        recipe=recipe,
        split=split,
        tasks=tasks,
        samples=samples,
        seed=seed,
        temperature=temperature,
        overrides=tuple(overrides or ()),
        runs_dir=runs_dir,
    )
    other = find_evaluation(runs_dir, against) if against else None

    async def work() -> "tuple[Evaluation, RunRoot]":
        return await carry_out(await prepare(request, recipes_dir()), lambda text: typer.echo(text, err=True))

    evaluation, root = asyncio.run(work())
    summary = summarize(evaluation)
    comparison = _compared(other, evaluation) if other is not None else None
    if as_json:
        facts = {**evaluation_facts(evaluation, summary), "path": root.join(f"evaluations/{evaluation.name}.json")}
        answer_json(facts if comparison is None else {**facts, "comparison": msgspec.to_builtins(comparison)})
    else:
        _print(evaluation, summary)
        if comparison is not None:
            typer.echo("")
            print_comparison(comparison)
    if not summary.overall.scored:
        fault = summary.overall.fault or "none was recorded"
        raise RunFailed(
            f"none of {summary.overall.episodes} episodes gave a valid reward; the first fault: {fault}."
            f" They are stored:  headrace inspect {root.url}"
        )


def _compared(other: "Evaluation", evaluation: "Evaluation") -> "Comparison":
    """The comparison with a stored evaluation; where it is refused, the message says where the new one is."""
    from headrace.platform.errors import ConfigError
    from headrace.platform.evaluation.comparison import compare, label

    try:
        return compare(other, evaluation)
    except ConfigError as error:
        raise ConfigError(f"{error}. The evaluation itself is stored as {label(evaluation)}") from None


def _print(evaluation: "Evaluation", summary: "EvaluationSummary") -> None:
    """The figures for people."""
    overall = summary.overall
    of = evaluation.model if evaluation.version is None else f"{evaluation.model}, version {evaluation.version}"
    typer.echo(
        f"{of}: {overall.episodes} episodes of {overall.tasks} {evaluation.split} tasks\n"
        f"  success        {overall.success or '-'}\n"
        f"  mean score     {overall.mean_score or '-'}\n"
        f"  pass@k         {_by_k(overall.pass_at)}\n"
        f"  pass^k         {_by_k(overall.pass_hat)}\n"
        f"  without score  {overall.unscored}{_errors(overall)}\n"
        f"  seconds        {_seconds(overall)}"
    )
    if len(summary.environments) > 1:
        typer.echo("by environment")
        width = max(map(len, summary.environments))
        for name, figures in summary.environments.items():
            typer.echo(
                f"  {name:{width}}  success {figures.success or '-'}  mean score {figures.mean_score or '-'}"
                f"  {figures.episodes} episodes, {figures.unscored} without score{_errors(figures)}"
            )
    typer.echo(
        f"\nStored as {evaluation.run}@{evaluation.name}.  headrace compare {evaluation.run}@{evaluation.name} OTHER"
    )


def _by_k(shares: dict[int, float]) -> str:
    """The shares for 1, 2, 4, … and the largest k."""
    shown = [k for k in shares if k & (k - 1) == 0 or k == max(shares)]
    return "   ".join(f"{k}: {shares[k]:.3f}" for k in shown) or "-"


def _errors(figures: "Figures") -> str:
    owners = ", ".join(f"{owner} {count}" for owner, count in figures.errors.items())
    return f"  (faults: {owners}; the first: {figures.fault})" if owners else ""


def _seconds(figures: "Figures") -> str:
    episode, tool = figures.episode_s, figures.tool_s
    parts = [f"episode {_percentiles(episode)}"] if episode else []
    parts += [f"in tools {_percentiles(tool)}"] if tool else []
    return "; ".join(parts) or "-"


def _percentiles(times: "Percentiles") -> str:
    p50, p99 = (f"{value:.3f}" if value >= _SHORTEST_S else "<0.001" for value in (times.p50_s, times.p99_s))
    return f"P50 {p50}, P99 {p99}"
