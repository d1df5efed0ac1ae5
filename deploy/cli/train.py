"""`headrace train`: a run from recipe to summary."""

import asyncio
from typing import Annotated, Any

import typer

from headrace.deploy.cli.options import Json, Overrides, Recipe, answer_json, recipes_dir


def train(
    recipe: Recipe,
    overrides: Overrides = None,
    ray_address: Annotated[str, typer.Option(help="Join this Ray cluster instead of starting a local one.")] = "",
    redis_url: Annotated[
        str, typer.Option(help="Use this Redis or Valkey; passwords by reference, such as ${env:REDIS_PASSWORD}.")
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved plan and start nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Train an agent. Try: headrace train lookup

    Starts a local Ray and an embedded Valkey unless told to join others, runs the recipe's supervised stages (cached
    after the first time), then reinforcement learning. Everything is left in a run root under runs/.
    """
    from headrace.deploy.checks import check_config, check_secrets
    from headrace.platform.config.load import dump_yaml, load_recipe

    changes = list(overrides or [])
    if ray_address:
        changes.append(f"runtime.ray_address={ray_address}")
    if redis_url:
        changes.append(f"queue.redis_url={redis_url}")
    config = load_recipe(recipe, changes, recipes_dir())
    check_config(config)
    if dry_run:
        if as_json:
            answer_json(config.model_dump(mode="json"))
        else:
            typer.echo(dump_yaml(config), nl=False)
        return
    check_secrets(config)

    from headrace.deploy.progress import RunState, open_progress
    from headrace.deploy.runtime import Runtime
    from headrace.deploy.train import create_run
    from headrace.deploy.train import train as carry_through

    context, root = create_run(config)
    runtime: Runtime
    if config.runtime.kind == "inprocess":
        from headrace.deploy.runtime_inprocess import InprocessRuntime

        runtime = InprocessRuntime(context)
    else:
        from headrace.deploy.ray_environment import keep_ray_local

        if not config.runtime.ray_address:
            keep_ray_local()
        from headrace.deploy.runtime_ray import RayRuntime

        runtime = RayRuntime(context)
    state = RunState(context.run)
    with open_progress(state, quiet=as_json) as progress:
        summary = asyncio.run(carry_through(context, root, runtime, state, progress))
    if as_json:
        answer_json(summary)
    else:
        _print(summary)


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
        f" + {fates['in_flight']} in flight\n"
        f"  learning curve     {summary['root']}/figures/learning_curve.png\n"
        f"\nLook inside:  headrace inspect {summary['run']}"
    )
