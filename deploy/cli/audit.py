"""`headrace audit`: what the tool gateway decided, and whether that record is whole."""

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.deploy.cli.options import Json, RunName, RunsDir, answer_json

if TYPE_CHECKING:
    from headrace.actors.gateway.audit.entry import Entry

_BREAKS_SHOWN = 20
_COLUMNS = ("time", "kind", "call", "tool", "decision", "tier", "capability", "taint", "arguments", "result")

audit = typer.Typer(
    help="Verify and read the audit of a run: one hash-chained entry for each decision of its tool gateways.",
    no_args_is_help=True,
)


@audit.command()
def verify(run: RunName, runs_dir: RunsDir = "runs", as_json: Json = False) -> None:
    """Compute every chain again, and look up the entry that each episode names. Try: headrace audit verify RUN

    Exit code 1 means that an entry was changed, removed, reordered or cut off, or that an episode called tools and
    names no entry that is there.
    """
    from headrace.deploy.auditing import audit_report, report_facts
    from headrace.platform.store.run_root import RunRoot

    root = RunRoot.find(runs_dir, run)
    report = audit_report(root)
    facts = report_facts(root, report)
    if as_json:
        answer_json(facts)
    else:
        typer.echo(_report_shown(facts), nl=False)
    if not report.holds:
        raise typer.Exit(1)


@audit.command()
def show(
    run: RunName,
    episode: Annotated[str, typer.Argument(help="An episode id, or any unique prefix of it.")] = "",
    last: Annotated[int, typer.Option(min=1, help="Without EPISODE: how many of the newest entries.")] = 40,
    runs_dir: RunsDir = "runs",
    as_json: Json = False,
) -> None:
    """Show the entries of an episode, or the newest ones. Try: headrace audit show RUN

    Arguments and results are there as hashes only.
    """
    import msgspec

    from headrace.deploy.auditing import episode_entries, last_entries
    from headrace.platform.store.run_root import RunRoot

    root = RunRoot.find(runs_dir, run)
    name, entries = episode_entries(root, episode) if episode else ("", last_entries(root, last))
    if as_json:
        answer_json({"run": root.name, "episode": name, "entries": msgspec.to_builtins(entries)})
    else:
        _print_entries(name or f"{root.name}: the newest entries", entries, with_episode=not name)


def _report_shown(facts: dict[str, Any]) -> str:
    chains = facts["chains"]
    lines = [f"{facts['run']}: {facts['entries']} entries in {len(chains)} chains, named by {facts['heads']} episodes"]
    for chain in chains:
        torn = "; its last line is torn, and nobody names it" if chain["torn"] else ""
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(chain["by_kind"].items()))
        lines.append(f"  {chain['chain']}: {kinds or 'no entries'}{torn}")
        lines += [f"    {count} denied by {rule}" for rule, count in sorted(chain["denied"].items())]
    breaks = facts["breaks"]
    lines += [f"BROKEN ({each['kind']}): {each['told']}" for each in breaks[:_BREAKS_SHOWN]]
    if len(breaks) > _BREAKS_SHOWN:
        lines.append(f"and {len(breaks) - _BREAKS_SHOWN} more; --json lists all")
    lines.append("The audit does not hold." if breaks else "The audit holds.")
    return "\n".join(lines) + "\n"


def _print_entries(title: str, entries: "list[Entry]", with_episode: bool) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    console = Console(highlight=False, markup=False, emoji=False)
    console.print(title)
    columns = (*(("episode",) if with_episode else ()), *_COLUMNS)
    table = Table(*(Column(column, no_wrap=True) for column in columns), box=None, padding=(0, 1))
    for entry in entries:
        table.add_row(*((_printable(entry.episode),) if with_episode else ()), *_cells(entry))
    console.print(table)


def _cells(entry: "Entry") -> tuple[str, ...]:
    decision = f"{entry.decision} {entry.rule}".strip()
    cells = (
        time.strftime("%H:%M:%S", time.localtime(entry.time_s)),
        entry.kind,
        "/".join(entry.key.rsplit("/", 2)[-2:]),
        entry.name,
        decision,
        entry.tier,
        entry.capability,
        ", ".join(entry.taint),
        entry.arguments_hash[:8],
        entry.result_hash[:8],
    )
    return tuple(_printable(cell) for cell in cells)


def _printable(text: str) -> str:
    """Somebody may have written to the audit what a terminal obeys."""
    return "".join(each if each.isprintable() else "?" for each in text)
