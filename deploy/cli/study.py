"""`headrace study`: a recipe under several conditions and seeds, side by side."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from headrace.deploy.cli.options import Json, Overrides, answer_json, recipes_dir

if TYPE_CHECKING:
    from headrace.deploy.study import Study

study = typer.Typer(help="Run a recipe under several conditions and seeds, side by side.", no_args_is_help=True)

_Seeds = Annotated[int, typer.Option("--seeds", min=1, help="How many seeds each condition is run with, from 0.")]
_Out = Annotated[Path, typer.Option("--out", help="The study's folder: figures, JSON, and every run's root.")]
_Steps = Annotated[int, typer.Option("--steps", min=4, help="Learner steps of each run.")]
_Only = Annotated[
    list[str] | None, typer.Option("--only", help="Only this condition, such as ppo or 'lag 4'; may be given again.")
]


@study.command()
def credit(
    overrides: Overrides = None,
    seeds: _Seeds = 3,
    steps: _Steps = 40,
    lag_steps: Annotated[int, typer.Option("--lag-steps", min=0, help="Of the runs by lag limit; 0: none.")] = 60,
    only: _Only = None,
    out: _Out = Path("studies/credit"),
    as_json: Json = False,
) -> None:
    """Compare algorithms on `lookup`, and lag limits on `lookup-slow`. Try: headrace study credit --seeds 1

    Algorithms are run in this process's own kind of runtime, one after the other, which is deterministic; lag limits
    are run with Ray, where time counts. All begin with the same cached weights. A study that was interrupted goes on.
    """
    from headrace.deploy.study import CREDIT, LAGS
    from headrace.platform.errors import ConfigError

    unknown = sorted(set(only or ()) - set(CREDIT) - set(LAGS))
    if unknown:
        raise ConfigError(f"there is no condition {', '.join(unknown)}; known: {', '.join([*CREDIT, *LAGS])}")
    changes = list(overrides or [])
    parts = [
        ("credit", "lookup", CREDIT, [f"learner.steps={steps}", "runtime.kind=inprocess"]),
        ("lag", "lookup-slow", LAGS, [f"learner.steps={lag_steps}"] if lag_steps else None),
    ]
    if only and not set(only) - set(LAGS) and not lag_steps:
        raise ConfigError("--lag-steps 0 runs no lag limit, and --only names nothing else; leave one of them out")
    studies = []
    for name, recipe, conditions, own in parts:
        chosen = {key: value for key, value in conditions.items() if not only or key in only}
        if chosen and own is not None:
            studies.append(_play(name, recipe, chosen, [*own, *changes], range(seeds), out, as_json))
    if as_json:
        answer_json({each.name: msgspec.to_builtins(each) for each in studies})


def _play(
    name: str,
    recipe: str,
    conditions: dict[str, tuple[str, ...]],
    changes: list[str],
    seeds: range,
    out: Path,
    quiet: bool,
) -> "Study":
    from headrace.deploy.study import run_study

    def say(condition: str, seed: int) -> None:
        if not quiet:
            typer.echo(f"{recipe}: {condition}, seed {seed}")

    done = run_study(
        name, recipe, recipes_dir(), conditions, seeds=seeds, changes=changes, out=out.absolute(), on_run=say
    )
    if not quiet:
        _print(done, list(conditions), out, out / f"{name}.png")
    return done


def _print(done: "Study", conditions: list[str], out: Path, picture: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("condition", "seed", "before", "after", "steps to 0.9", "seconds to 0.9", "run", box=None)
    for condition in conditions:
        for run in done.of(condition):
            steps = str(run.steps_to_goal or "not reached")
            seconds = f"{run.seconds_to_goal:.0f}" if run.seconds_to_goal is not None else ""
            name = run.root.rpartition("/")[2]
            table.add_row(condition, str(run.seed), f"{run.before:.3f}", f"{run.after:.3f}", steps, seconds, name)
    Console(highlight=False, markup=False, emoji=False).print(table)
    typer.echo(f"figure: {picture}\nLook inside:  headrace inspect RUN --runs-dir {out / 'runs'}")
