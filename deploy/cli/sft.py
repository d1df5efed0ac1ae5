"""`headrace sft`: the supervised stages of a recipe, alone."""

from pathlib import Path
from typing import Annotated

import typer

from headrace.deploy.cli.options import Json, Overrides, Recipe, answer_json, recipes_dir


def sft(
    recipe: Recipe,
    overrides: Overrides = None,
    out: Annotated[str, typer.Option(help="Write the model to this folder instead of the cache.")] = "",
    as_json: Json = False,
) -> None:
    """Run a recipe's supervised stages and leave a Hugging Face folder. Try: headrace sft lookup --out base"""
    from headrace.deploy.base_model import prepare_base_model
    from headrace.deploy.checks import check_config
    from headrace.deploy.progress import RunState, open_progress
    from headrace.platform.config.load import load_recipe
    from headrace.platform.errors import ConfigError

    config = load_recipe(recipe, list(overrides or []), recipes_dir())
    if config.sft is None:
        raise ConfigError(f"the recipe {recipe!r} has no supervised stages (key: sft)")
    check_config(config)
    folder = Path(out).resolve() if out else None
    if folder is not None and folder.exists():
        raise ConfigError(f"{folder} exists already; name a new folder")
    state = RunState(f"{config.name} sft")
    with open_progress(state, quiet=as_json) as progress:
        progress.stage("supervised stages")
        base = prepare_base_model(config, progress.sft, folder)
    if as_json:
        answer_json({"path": str(base.path), "cached": base.cached, "stages": list(base.stages)})
        return
    for stage in base.stages:
        typer.echo(f"{stage['stage']}: {stage['steps']} steps, success {stage['success']:.3f}")
    typer.echo(f"{'cached' if base.cached else 'written'}: {base.path}")
