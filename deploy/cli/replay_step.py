"""`headrace replay-step`: recompute a learner step from its stored episodes and compare the weights by hash."""

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from headrace.deploy.cli.options import BeginAt, Json, LearnerStep, RunName, RunsDir, answer_json

if TYPE_CHECKING:
    from headrace.deploy.replay_step import ReplayedStep, TakenStep

_LISTED = 8


def replay_step(
    run: RunName,
    step: LearnerStep = None,
    begin: BeginAt = None,
    runs_dir: RunsDir = "runs",
    as_json: Json = False,
) -> None:
    """Recompute a learner step and say whether its weights are those that were published.

    Begins at the newest complete checkpoint before the step, opens the groups that each step consumed, in the order of
    training, and takes the steps with the run's own configuration. Exit code 1 means that the weights differ, 2 that
    the step cannot be recomputed.
    """
    from headrace.deploy.replay_step import replay_step as replayed
    from headrace.platform.store.run_root import RunRoot

    root = RunRoot.find(runs_dir, run)
    found = asyncio.run(replayed(root, step, begin, news=_ignore if as_json else _tell))
    if as_json:
        answer_json({"run": root.name, **asdict(found), "equal": found.equal})
    else:
        _conclude(found)
    if not found.equal:
        raise typer.Exit(1)


def _ignore(_: "TakenStep") -> None:
    """The answer has it all."""


def _tell(taken: "TakenStep") -> None:
    of_record = "" if taken.loss_of_record is None else f" (of record {taken.loss_of_record:.8g})"
    typer.echo(
        f"step {taken.step}: {taken.groups} groups, {taken.loss_tokens} loss tokens, loss {taken.loss:.8g}{of_record},"
        f" gradient norm {taken.grad_norm:.6g}"
    )


def _conclude(found: "ReplayedStep") -> None:
    typer.echo(f"version {found.version}, from the checkpoint of version {found.begun_at}")
    typer.echo(f"  hash found      {found.found}\n  hash of record  {found.of_record}")
    if found.equal:
        typer.echo("equal: the weights are those that were published")
        return
    typer.echo(f"they differ, in {', '.join(found.files)}")
    if found.differences is None:
        typer.echo(f"  the files of version {found.version} were removed, so it cannot be said by how much")
        return
    for tensor, far in found.differences[:_LISTED]:
        typer.echo(f"  {tensor}: {far:.3g}")
    if len(found.differences) > _LISTED:
        typer.echo(f"  ... and {len(found.differences) - _LISTED} more tensors; --json lists them")
