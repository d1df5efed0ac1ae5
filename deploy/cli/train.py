"""`headrace train`: a run from recipe to summary."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.deploy.cli.options import Json, Overrides, answer_json, recipes_dir

if TYPE_CHECKING:
    from headrace.deploy.context import RunContext
    from headrace.deploy.resume import Past
    from headrace.deploy.runtime import Runtime
    from headrace.platform.config import RunConfig
    from headrace.platform.store.run_root import RunRoot


def train(
    recipe: Annotated[
        str,
        typer.Argument(
            help="A recipe such as 'lookup', or the path of a YAML file; with --resume, a run.",
            show_default=False,
        ),
    ],
    overrides: Overrides = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with a run; name it instead of a recipe."),
    ] = False,
    runs_dir: Annotated[str, typer.Option("--runs-dir", help="The folder that holds run roots.")] = "",
    ray_address: Annotated[str, typer.Option(help="Join this Ray cluster instead of starting a local one.")] = "",
    redis_url: Annotated[
        str, typer.Option(help="Use this Redis or Valkey; passwords by reference, such as ${env:REDIS_PASSWORD}.")
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved plan and start nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Train an agent. Try: headrace train lookup

    Or go on with a run that was ended early: headrace train --resume RUN

    Starts a local Ray and an embedded Valkey unless told to join others, runs the recipe's supervised stages (cached
    after the first time), then reinforcement learning. Everything is left in a run root under runs/.
    """
    changes = list(overrides or [])
    if ray_address:
        changes.append(f"runtime.ray_address={ray_address}")
    if redis_url:
        changes.append(f"queue.redis_url={redis_url}")
    if runs_dir:
        changes.append(f"runs_dir={runs_dir}")
    if resume:
        _resume(recipe, changes, dry_run, as_json)
    else:
        _start(recipe, changes, dry_run, as_json)


def _start(recipe: str, changes: list[str], dry_run: bool, as_json: bool) -> None:
    from headrace.deploy.checks import check_config, check_secrets
    from headrace.platform.config.load import load_recipe

    config = load_recipe(recipe, changes, recipes_dir())
    check_config(config)
    if dry_run:
        _show_plan(config, as_json)
        return
    check_secrets(config)

    from headrace.deploy.train import create_run

    _carry_through(*create_run(config), None, as_json)


def _show_plan(config: "RunConfig", as_json: bool) -> None:
    from headrace.platform.config.load import dump_yaml

    if as_json:
        answer_json(config.model_dump(mode="json"))
    else:
        typer.echo(dump_yaml(config), nl=False)


def _resume(run: str, changes: list[str], dry_run: bool, as_json: bool) -> None:
    from headrace.deploy.checks import check_config, check_secrets
    from headrace.deploy.resume import open_run, take_up

    given = [change.partition("=")[2] for change in changes if change.startswith("runs_dir=")]
    context, root = open_run(given[-1] if given else "runs", run, changes)
    check_config(context.config)
    if dry_run:
        _show_plan(context.config, as_json)
        return
    check_secrets(context.config)
    _carry_through(context, root, lambda: take_up(root), as_json)


def _carry_through(context: "RunContext", root: "RunRoot", take_up: "Callable[[], Past] | None", as_json: bool) -> None:
    from headrace.deploy.progress import RunState, open_progress
    from headrace.deploy.run_lock import RunClaim, RunLock
    from headrace.deploy.train import train as carry_through

    claim = contextlib.nullcontext() if root.is_local else RunClaim(root.url, context.run)
    with RunLock(context.local("."), context.run), claim:
        past = take_up() if take_up is not None else None
        runtime = _runtime(context)
        state = RunState(context.run)
        with open_progress(state, quiet=as_json) as progress:
            summary = asyncio.run(carry_through(context, root, runtime, state, progress, past))
    if as_json:
        answer_json(summary)
    else:
        _print(summary)


def _runtime(context: "RunContext") -> "Runtime":
    if context.config.runtime.kind == "inprocess":
        from headrace.deploy.runtime_inprocess import InprocessRuntime

        return InprocessRuntime(context)
    from headrace.deploy.ray_environment import keep_ray_local

    if not context.config.runtime.ray_address:
        keep_ray_local()
    from headrace.deploy.runtime_ray import RayRuntime

    return RayRuntime(context)


def _restarts(summary: dict[str, Any]) -> str:
    """A line about what died and was started again, if anything did."""
    parts = ", ".join(f"{part} {n} times" if n > 1 else part for part, n in sorted(summary["restarts"].items()))
    return f"  started again      {parts}\n" if parts else ""


def _print(summary: dict[str, Any]) -> None:
    """The summary for people."""
    fates = summary["fates"]
    before, after = summary["score_before"], summary["score_after"]
    graded = (before, after) != (summary["success_before"], summary["success_after"])
    score = f"  mean score         {before:.3f} -> {after:.3f}\n" if graded else ""
    typer.echo(
        f"\n{summary['run']} is done in {summary['seconds']:.0f} s.\n"
        f"  success            {summary['success_before']:.3f} -> {summary['success_after']:.3f}"
        f"  (before -> after {summary['learner_steps']} learner steps)\n{score}"
        f"  asynchrony         {summary['lag_share_ge1']:.0%} of trained episodes had a lag of 1 or more,"
        f" at most {summary['lag_max_trained']}; overlap {summary['overlap']:.2f}\n"
        f"  attempts           {fates['dispatched']} dispatched = {fates['trained']} trained"
        f" + {fates['dropped']} dropped + {fates['failed']} failed + {fates['cancelled']} cancelled"
        f" + {fates['in_flight']} in flight\n{_restarts(summary)}"
        f"  learning curve     {summary['root']}/figures/learning_curve.png\n"
        f"\nLook inside:  headrace inspect {summary['run']}"
    )
