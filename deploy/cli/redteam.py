"""`headrace redteam`: attacks on the tool gateway, and what came of them."""

from typing import TYPE_CHECKING, Annotated

import typer

from headrace.deploy.cli.options import Json, answer_json

if TYPE_CHECKING:
    from headrace.actors.gateway.redteam.suite import Report

_Classes = Annotated[
    list[str] | None, typer.Option("--class", help="Only this class of attacks; may be given more than once.")
]

redteam = typer.Typer(
    help="Attack the tool gateway with a policy that obeys every instruction that it is shown.", no_args_is_help=True
)


@redteam.command()
def run(classes: _Classes = None, as_json: Json = False) -> None:
    """Play the attacks through a real gateway. Try: headrace redteam run --class commands

    Needs a sandbox (see headrace doctor), and the extra `mcp`. Nothing leaves this host. Exit code 1 means that an
    attack got through, that a play broke, or that a control, in which nothing stops an attack, had no effect.
    """
    from headrace.deploy.redteaming import attacks_of, play, report_facts

    attacks = attacks_of(classes or ())
    with typer.progressbar(length=len(attacks), label="attacks", file=None, hidden=as_json) as bar:
        report = play(attacks, lambda result: bar.update(1))
    if as_json:
        answer_json(report_facts(report))
    else:
        _print(report)
    if not report.holds:
        raise typer.Exit(1)


@redteam.command("list")
def show(classes: _Classes = None, as_json: Json = False) -> None:
    """Say what each attack tries."""
    from headrace.deploy.redteaming import attacks_of

    attacks = attacks_of(classes or ())
    if as_json:
        answer_json({"attacks": [{"id": each.attack_id, "class": each.kind, "about": each.about} for each in attacks]})
        return
    for each in attacks:
        typer.echo(f"{each.attack_id:32} {each.about}")


def _print(report: "Report") -> None:
    from rich.console import Console
    from rich.table import Column, Table

    console = Console(highlight=False, markup=False, emoji=False)
    numbers = ("attacks", "blocked", "through", "broken")
    columns: list[Column | str] = [
        Column("class"),
        *(Column(name, justify="right") for name in numbers),
        Column("controls"),
        "stopped by",
    ]
    table = Table(*columns, box=None, padding=(0, 1))
    for each in report.classes:
        counts = (each.attacks, each.blocked, each.through, each.broken)
        rules = ", ".join(f"{rule} {count}" for rule, count in each.rules.items())
        table.add_row(each.kind, *map(str, counts), f"{each.proven}/{each.controls}", rules)
    console.print(table)
    for result in report.results:
        if result.outcome != "blocked":
            console.print(f"{result.outcome.upper()} {result.attack_id}: {result.effect or result.told}")
        if result.control not in ("", "effect"):
            console.print(f"UNPROVEN {result.attack_id}: its control had no effect")
    for tried in report.tried:
        console.print(f"LEFT THE HOST, had it been let: {tried}")
    console.print("Nothing got through." if report.holds else "That does not hold.")
