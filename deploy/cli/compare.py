"""`headrace compare`: two stored evaluations, episode against episode."""

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from headrace.deploy.cli.options import Json, RunsDir, answer_json

if TYPE_CHECKING:
    from headrace.platform.evaluation.comparison import Comparison, Difference

_REFERENCE = "A stored evaluation: RUN (its newest), RUN@VERSION, RUN@best, RUN@NAME, or the path of its JSON file."


def compare(
    a: Annotated[str, typer.Argument(help=_REFERENCE, show_default=False)],
    b: Annotated[str, typer.Argument(help="Another one; differences are b - a.", show_default=False)],
    runs_dir: RunsDir = "runs",
    as_json: Json = False,
) -> None:
    """Say whether one evaluation is better than another. Try: headrace compare RUN@0 RUN

    Pairs episodes of the same task, seed and sample; gives the difference with a paired 95 % bootstrap interval over
    tasks, wins and losses, and a permutation p-value.
    """
    from headrace.platform.evaluation.comparison import compare as pairwise
    from headrace.platform.store.evaluations import find_evaluation

    comparison = pairwise(find_evaluation(runs_dir, a), find_evaluation(runs_dir, b))
    if as_json:
        answer_json(msgspec.to_builtins(comparison))
    else:
        print_comparison(comparison)


def print_comparison(comparison: "Comparison") -> None:
    """A comparison for people."""
    overall = comparison.overall
    typer.echo(
        f"a  {comparison.a}: success {overall.success_a:.3f}, mean score {overall.score_a:.3f}\n"
        f"b  {comparison.b}: success {overall.success_b:.3f}, mean score {overall.score_b:.3f}\n"
        f"  b - a          success {overall.success}, mean score {overall.score}\n"
        f"  pairs          {_pairs(overall)}"
    )
    if comparison.unpaired:
        reasons = ", ".join(f"{count} {reason}" for reason, count in comparison.unpaired.items())
        typer.echo(f"  not paired     {reasons}")
    if len(comparison.environments) > 1:
        width = max(map(len, comparison.environments))
        for name, difference in comparison.environments.items():
            typer.echo(f"  {name:{width}}  b - a: mean score {difference.score}  {_pairs(difference)}")
    for warning in comparison.warnings:
        typer.echo(f"  warning: {warning}")
    typer.echo(comparison.verdict)


def _pairs(difference: "Difference") -> str:
    return (
        f"{difference.pairs} of {difference.tasks} tasks: b won {difference.wins}, lost {difference.losses},"
        f" tied {difference.ties}; p = {difference.p_value:.2g}"
    )
