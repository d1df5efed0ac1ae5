"""`headrace env`: begin an environment of one's own, and find what is wrong with it before a run does."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.deploy.cli.options import Json, SandboxText, answer_json, json_object, sandbox_config
from headrace.deploy.cli.serve import serve
from headrace.deploy.new_environment import DoorName

if TYPE_CHECKING:
    from headrace.deploy.environment_check import Report

env = typer.Typer(
    help="Begin an environment of your own, check it, and host it. All commands take --json.", no_args_is_help=True
)


@env.command()
def new(
    name: Annotated[str, typer.Argument(help="What to call it, such as word_game.", show_default=False)],
    door: Annotated[
        DoorName, typer.Option(help="A data set and a reward, functions as tools, or the full contract.")
    ] = DoorName.ENVIRONMENT,
    folder: Annotated[str, typer.Option("--dir", help="Where to write it.")] = ".",
    as_json: Json = False,
) -> None:
    """Write a small working environment to change. Try: headrace env new word_game --door reward"""
    from headrace.deploy.new_environment import write_environment

    target, written = write_environment(name, door, Path(folder))
    target = target if Path(target).is_absolute() else f"./{target}"
    if as_json:
        answer_json({"target": target, "files": [str(path) for path in written]})
        return
    for path in written:
        typer.echo(f"written: {path}")
    typer.echo(f"\nCheck it:   headrace env check {target}\nTrain it:   headrace train {target} model.path=FOLDER")


@env.command()
def check(
    target: Annotated[
        str, typer.Argument(help="./file.py:Name, package.module:Name, or a registered name.", show_default=False)
    ],
    args: Annotated[str, typer.Option(help="The environment's args, as a JSON object.")] = "{}",
    tasks: Annotated[int, typer.Option(min=1, help="Training tasks to play.")] = 3,
    deadline_s: Annotated[float, typer.Option("--deadline", min=0.1, help="Seconds that one call may take.")] = 20.0,
    sandbox: SandboxText = "",
    as_json: Json = False,
) -> None:
    """Load an environment, play it without a model, and hold it to every rule that training relies on.

    It is played by its own demonstrate(task), a static method that returns the messages of an assistant who solves the
    task, or else at random. Exit code 1 means that a check failed.
    """
    from headrace.deploy.environment_check import check_environment

    report = check_environment(target, json_object("--args", args), tasks, deadline_s, sandbox_config(sandbox))
    if as_json:
        answer_json(_as_json(report))
    else:
        _print(report)
    if not report.passed:
        raise typer.Exit(1)


env.command()(serve)


def _counts(report: "Report") -> dict[str, int]:
    from headrace.deploy.environment_check import Outcome

    return {outcome.value: report.count(outcome) for outcome in Outcome}


def _as_json(report: "Report") -> dict[str, Any]:
    findings = [asdict(finding) for finding in report.findings]
    return {"target": report.target, "passed": report.passed, "counts": _counts(report), "checks": findings}


def _print(report: "Report") -> None:
    styles = {"ok": typer.colors.GREEN, "failed": typer.colors.RED, "not shown": typer.colors.YELLOW}
    for finding in report.findings:
        typer.echo(typer.style(f"{finding.outcome.value:10}", fg=styles[finding.outcome.value]) + finding.title)
        for line in (finding.explanation, finding.mend):
            if line:
                typer.echo(f"{'':10}  {line}")
    counted = ", ".join(f"{count} {name}" for name, count in _counts(report).items())
    typer.echo(f"\n{report.target}: {len(report.findings)} checks, {counted}")
