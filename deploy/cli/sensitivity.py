"""`headrace sensitivity`: what other off-policy corrections would have made of a stored batch."""

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING

from headrace.deploy.cli.options import BeginAt, Json, LearnerStep, RunName, RunsDir, answer_json

if TYPE_CHECKING:
    from rich.table import Table

    from headrace.deploy.sensitivity import Sensitivity
    from headrace.trainer.sensitivity import Bucket, Correction

_WIDTH = 120


def sensitivity(
    run: RunName,
    step: LearnerStep = None,
    begin: BeginAt = None,
    runs_dir: RunsDir = "runs",
    as_json: Json = False,
) -> None:
    """Score a stored batch under each off-policy correction, at the weights that were about to learn from it.

    For each: loss, gradient norm, cosine of its gradient with the uncorrected one and with the run's own, clip share,
    and effective sample sizes, over all, by lag and by quartile of length. Nothing of the run is changed.
    """
    from headrace.deploy.sensitivity import step_sensitivity
    from headrace.platform.store.run_root import RunRoot

    root = RunRoot.find(runs_dir, run)
    found = asyncio.run(step_sensitivity(root, step, begin))
    if as_json:
        answer_json({"run": root.name, **asdict(found)})
    else:
        _print(root.name, found)


def _print(run: str, found: "Sensitivity") -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    console.width = max(console.width, _WIDTH)  # figures that are compared are not cut
    own = next(each for each in found.corrections if each.is_own)
    console.print(
        f"{run}, learner step {found.step}: {found.groups} groups, {own.all.sequences} sequences, {own.all.tokens} loss"
        f" tokens, KL {own.all.kl:.3g} nats; the run's own correction is marked *"
    )
    table = _table("correction", "loss", "grad norm", "cos none", "cos own", "clipped", "largest", "ESS tok", "ESS seq")
    for each in found.corrections:
        gradient = (f"{each.grad_norm:.4g}", _number(each.cosine_uncorrected), _number(each.cosine_own))
        loss, *rest = _cells(each.all)
        table.add_row(_marked(each), loss, *gradient, *rest)
    console.print(table)
    for title, name in (("lag", "by_lag"), ("length", "by_length")):
        if len(getattr(own, name)) > 1:
            console.print(_by_bucket(found, title, name))


def _by_bucket(found: "Sensitivity", title: str, name: str) -> "Table":
    """What is the same for all corrections stands in the first line of a bucket."""
    table = _table(title, "sequences", "tokens", "KL", "correction", "loss", "clipped", "largest", "ESS tok", "ESS seq")
    for key in getattr(found.corrections[0], name):
        told = f"<= {key}" if name == "by_length" else str(key)
        for number, each in enumerate(found.corrections):
            bucket = getattr(each, name)[key]
            common = (told, str(bucket.sequences), str(bucket.tokens), f"{bucket.kl:.3g}")
            table.add_row(*(common if number == 0 else [""] * len(common)), _marked(each), *_cells(bucket))
    return table


def _marked(each: "Correction") -> str:
    return each.name + "*" * each.is_own


def _table(*columns: str) -> "Table":
    from rich.table import Column, Table

    return Table(*(Column(column, no_wrap=True, justify="right") for column in columns), box=None, padding=(0, 1))


def _cells(bucket: "Bucket") -> tuple[str, ...]:
    weights = (f"{bucket.largest_weight:.4g}", _number(bucket.token_share), _number(bucket.sequence_share))
    return (f"{bucket.loss:.5g}", f"{bucket.clip_share:.4f}", *weights)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
