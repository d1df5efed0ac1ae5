"""`headrace suite`: fixed replay suites, which tell a worse model from a changed world."""

import asyncio
from typing import Annotated

import typer

from headrace.deploy.cli.options import Json, RunName, RunsDir, answer_json

suite = typer.Typer(
    help="Keep recorded episodes in one file, and tell later whether the model got worse or the world changed.",
    no_args_is_help=True,
)


@suite.command()
def freeze(
    run: RunName,
    out: Annotated[str, typer.Option(help="The file to write.", show_default=False)],
    episodes: Annotated[int, typer.Option(min=1, help="How many.")] = 64,
    seed: Annotated[int, typer.Option(help="Picks others.")] = 0,
    runs_dir: RunsDir = "runs",
    as_json: Json = False,
) -> None:
    """Write episodes of a run, with their rewards, to one file. Try: headrace suite freeze RUN --out suite.msgpack

    Half of them, or less, cover each kind of ending in each environment; the others are drawn from the newest version
    that was evaluated, and a policy is compared on them. All must replay equal now.
    """
    from headrace.deploy.suites import check_out, nothing_to_compare
    from headrace.deploy.suites import freeze as carry_out
    from headrace.platform.store.run_root import RunRoot

    check_out(out)
    frozen = asyncio.run(carry_out(RunRoot.find(runs_dir, run), out, episodes, seed))
    header = frozen.header
    compared = sum(each.compared for each in frozen.episodes)
    useless = nothing_to_compare(frozen)
    if as_json:
        answer_json(
            {
                "file": out,
                "run": header.run,
                "episodes": len(frozen.episodes),
                "compared": compared,
                "not_comparable": useless,
                "version": header.version,
                "success": header.success,
                "endings": header.endings,
            }
        )
        return
    typer.echo(f"{out}: {len(frozen.episodes)} episodes of {header.run}, all replay equal")
    for ending, count in sorted(header.endings.items()):
        typer.echo(f"  {count:4}  {ending}")
    if useless:
        typer.echo(f"No policy can be compared on this suite: {useless}")
        return
    success = "without a score" if header.success is None else f"success {header.success:.3f}"
    played = "several versions" if header.version is None else f"version {header.version}"
    typer.echo(f"{compared} of them, played by {played}, are what a policy is compared on: {success}")


@suite.command()
def run(
    file: Annotated[str, typer.Argument(help="What `headrace suite freeze` wrote.", show_default=False)],
    run: Annotated[str, typer.Option(help="Play the tasks again with this run's policy.")] = "",
    version: Annotated[str, typer.Option(help="Of the run: a number, `latest` or `best`. Default: latest.")] = "",
    runs_dir: RunsDir = "runs",
    as_json: Json = False,
) -> None:
    """Replay a suite, play it with a policy if one is named, and give the verdict.

    Try: headrace suite run suite.msgpack --run RUN

    Exit code 1 means that the world changed or could not be tried, or that the model is significantly worse.
    """
    from headrace.deploy.suites import check_world, nothing_to_compare, play_model, read_suite, verdict
    from headrace.platform.errors import ConfigError
    from headrace.platform.store.run_root import RunRoot

    if version and not run:
        raise ConfigError("--version belongs to a run; give --run too")
    frozen = read_suite(file)
    root = RunRoot.find(runs_dir, run) if run else None
    if root is not None and (why := nothing_to_compare(frozen)):
        raise ConfigError(f"{file}: {why}; leave out --run to look at the world alone")
    tally = asyncio.run(check_world(frozen))
    comparison = None
    if root is not None and not tally.stopped:
        comparison = asyncio.run(play_model(frozen, root, version or "latest"))
    facts = verdict(frozen, tally, comparison)
    if as_json:
        answer_json(facts)
    else:
        typer.echo(facts["verdict"])
    if facts["world"] != "same" or facts["model"] == "worse":
        raise typer.Exit(1)
