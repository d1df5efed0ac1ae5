"""`headrace doctor`: what this machine can run."""

from typing import TYPE_CHECKING, Annotated

import typer

from headrace.deploy.cli.options import Json, RunsDir, answer_json

if TYPE_CHECKING:
    from headrace.deploy.doctor import Report


def doctor(
    runs_dir: RunsDir = "runs",
    redis_url: Annotated[
        str, typer.Option(help="Ask this Redis or Valkey too; passwords by reference, such as ${env:REDIS_PASSWORD}.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Say what this machine can run, what is missing, and the command that fixes it.

    Exit code 0 means that everything that `headrace train lookup` needs is there; optional things may be missing.
    Takes at most ten seconds, changes nothing and leaves nothing running.
    """
    from headrace.deploy.doctor import run_checks
    from headrace.platform.config.secret_references import literal_password
    from headrace.platform.errors import ConfigError

    if literal_password(redis_url):
        raise ConfigError("--redis-url spells a password out; refer to it instead: ${env:NAME} or ${file:PATH}")
    report = run_checks(runs_dir, redis_url)
    if as_json:
        answer_json(report.data())
    else:
        _print(report)
    if not report.ok:
        raise typer.Exit(1)


def _print(report: "Report") -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from headrace.deploy.doctor import Status

    styles = {Status.OK: "green", Status.MISSING: "dim", Status.WARN: "yellow", Status.FAIL: "bold red"}
    console = Console(highlight=False, markup=False, emoji=False)
    table, group = Table.grid(padding=(0, 2)), ""
    for check in report.checks:
        if check.group != group:
            group = check.group
            table.add_row("", Text(group, "bold"))
        detail = Text(check.detail)
        if check.fix:
            detail.append(f"\n-> {check.fix}", "cyan")
        table.add_row(Text(f"{check.status:>7}", styles[check.status]), check.name, detail)
    console.print(table)
    failed = [check.name for check in report.checks if check.status is Status.FAIL]
    if failed:
        console.print(f"\n`headrace train lookup` does not run here yet: {', '.join(failed)}", style="bold red")
    else:
        console.print("\nEverything that `headrace train lookup` needs is here.", style="bold green")
