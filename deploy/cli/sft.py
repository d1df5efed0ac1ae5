"""`headrace sft`: supervised training, of a recipe's stages or on data alone."""

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.deploy.cli.options import Json, Overrides, RunsDir, answer_json, recipes_dir

if TYPE_CHECKING:
    from headrace.deploy.base_model import SftStep
    from headrace.platform.store.run_root import RunRoot

_DATA_SUFFIXES = (".jsonl", ".parquet")
_RECIPE_SUFFIXES = (".yaml", ".yml")
_FILTER = "score >= 1"
_NOTES = 10
_NOTE = {
    "unknown_words": "what others say has words that the model's tokenizer does not know",
    **{
        f"{what}_not_shown": f"the model's template does not show {shown}; the model does not see it"
        for what, shown in (
            ("system", "the system's message"),
            ("user", "a user's message"),
            ("tool", "a tool's result"),
            ("tools", "the list of tools"),
        )
    },
}


def sft(
    data: Annotated[
        str,
        typer.Argument(
            help="Chats as .jsonl or .parquet, a run whose episodes are imitated, or a recipe by name or path.",
            show_default=False,
        ),
    ],
    overrides: Overrides = None,
    model: Annotated[str, typer.Option(help="Folder to start from. For a run: its newest version by default.")] = "",
    out: Annotated[str, typer.Option(help="New folder for the model. A recipe's goes to the cache without it.")] = "",
    chosen: Annotated[
        str, typer.Option("--filter", help=f"Which episodes of a run, such as 'turns <= 3'; '{_FILTER}' by default.")
    ] = "",
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps, instead of --epochs.")] = None,
    epochs: Annotated[float | None, typer.Option(min=0.01, help="How often the data is gone through. [1]")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate. [2e-5]")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Traces per step. [16]")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=8, help="Longer traces are left out. [2048]")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Decides order and what is held out. [0]")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads. [1]")] = None,
    runs_dir: RunsDir = "runs",
    as_json: Json = False,
) -> None:
    """Imitate demonstrations and leave a Hugging Face folder. Try: headrace sft lookup --out base

    DATA is one of three. Chats: rows with `messages`, and `tools` where there are any, as OpenAI's API writes them.
    A run: its stored episodes that a filter takes, which is rejection sampling. A recipe: its supervised stages, with
    KEY=VALUE overrides. Of chats and episodes 5 % are held out, and the loss on them is told before and after.
    """
    from headrace.platform.errors import ConfigError

    given = {"steps": steps, "epochs": epochs, "lr": lr, "batch": batch, "max_tokens": max_tokens}
    given |= {"seed": seed, "threads": threads}
    settings = {name: value for name, value in given.items() if value is not None}
    for name, value in (("--lr", lr), ("--epochs", epochs)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{name} {value}: give a number above 0")
    if _is_recipe(data):
        options = [name for name, value in (("model", model), ("filter", chosen)) if value]
        _refuse(
            [*options, *settings],
            "belongs to data and runs; change a recipe by KEY=VALUE, such as sft.stages.0.lr=1e-3",
        )
        _recipe(data, list(overrides or []), out, as_json)
        return
    source = Path(data) if _is_file(data) else _run(data, runs_dir)
    if overrides:
        raise ConfigError(f"{overrides[0]}: only a recipe has settings to override; see the options of headrace sft")
    if not out:
        raise ConfigError("--out is missing: name a new folder for the model")
    if steps is not None and epochs is not None:
        raise ConfigError("--steps and --epochs say the same; give one of them")
    if isinstance(source, Path):
        _refuse(["filter"] if chosen else [], "chooses episodes of a run, not rows of a file")
        if not model:
            raise ConfigError("--model is missing: name the Hugging Face folder to start from")
    _data(source, model, Path(out), settings, chosen or _FILTER, as_json)


def _is_recipe(data: str) -> bool:
    from headrace.platform.config.load import known_recipes

    return data.endswith(_RECIPE_SUFFIXES) or ".py:" in data or data in known_recipes(recipes_dir())


def _is_file(data: str) -> bool:
    """Whether `data` names a file; whether of chats is told when it is read."""
    return Path(data).is_file() or Path(data).suffix.lower() in (*_DATA_SUFFIXES, ".json", ".csv")


def _refuse(options: Sequence[str], why: str) -> None:
    from headrace.platform.errors import ConfigError

    if options:
        raise ConfigError(f"--{options[0].replace('_', '-')} {why}")


def _run(name: str, runs_dir: str) -> "RunRoot":
    from headrace.platform.config.load import known_recipes
    from headrace.platform.errors import NotFound
    from headrace.platform.store.run_root import RunRoot

    try:
        return RunRoot.find(runs_dir, name)
    except NotFound as error:
        recipes = known_recipes(recipes_dir())
        near = get_close_matches(name, recipes, 1) or recipes
        raise NotFound(
            f"{name!r} is neither a .jsonl or .parquet file nor a recipe ({', '.join(near)}), and {error}"
        ) from None


def _recipe(recipe: str, overrides: list[str], out: str, as_json: bool) -> None:
    from headrace.deploy.base_model import prepare_base_model
    from headrace.deploy.checks import check_config
    from headrace.deploy.new_folder import check_new_folder
    from headrace.deploy.progress import RunState, open_progress
    from headrace.platform.config.load import load_recipe
    from headrace.platform.errors import ConfigError

    config = load_recipe(recipe, overrides, recipes_dir())
    if config.sft is None:
        raise ConfigError(f"the recipe {recipe!r} has no supervised stages (key: sft)")
    check_config(config)
    folder = Path(out).resolve() if out else None
    if folder is not None:
        check_new_folder(folder)
    state = RunState(f"{config.name} sft")
    with open_progress(state, quiet=as_json) as progress:
        progress.stage("supervised stages")
        base = prepare_base_model(config, progress.sft, folder)
    if as_json:
        answer_json({"path": str(base.path), "cached": base.cached, "stages": list(base.stages)})
        return
    for stage in base.stages:
        _print_notes(stage["traces"])
        held_out = "" if stage["loss_after"] is None else f", held-out loss {stage['loss_after']:.3f}"
        typer.echo(f"{stage['stage']}: {stage['steps']} steps, success {stage['success']:.3f}{held_out}")
    typer.echo(f"{'cached' if base.cached else 'written'}: {base.path}")


def _data(
    data: "Path | RunRoot", model: str, out: Path, settings: Mapping[str, Any], chosen: str, as_json: bool
) -> None:
    from headrace.actors.demonstrations.chats import check_chat_file
    from headrace.deploy.finetune import FinetuneSettings, finetune
    from headrace.deploy.model_folder import resolve_model_folder
    from headrace.deploy.new_folder import check_new_folder
    from headrace.deploy.progress import RunState, open_progress
    from headrace.deploy.stored_version import open_version
    from headrace.platform.config import ModelConfig

    began = time.monotonic()
    check_new_folder(Path(out).resolve())
    if isinstance(data, Path):
        check_chat_file(data)
    if model or isinstance(data, Path):
        model_dir = resolve_model_folder(ModelConfig(path=model))
    else:
        _, model_dir = asyncio.run(open_version(data, "latest"))
    state = RunState(f"{data.name} sft")
    with open_progress(state, quiet=as_json) as progress:
        progress.stage(f"imitating {data.name}")

        def on_progress(step: "SftStep") -> None:
            progress.sft(step)
            if step.step % max(step.max_steps // _NOTES, 1) == 0:
                progress.note(f"step {step.step}/{step.max_steps}  loss {step.loss:.3f}")

        report = finetune(data, model_dir, out.resolve(), FinetuneSettings(**settings), on_progress, chosen)
    report |= {"path": str(out.resolve()), "model": str(model_dir), "seconds": round(time.monotonic() - began, 2)}
    if as_json:
        answer_json(report)
    else:
        _print(report)


def _print(report: Mapping[str, Any]) -> None:
    traces = report["traces"]
    left_out = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in traces["left_out"].items())
    typer.echo(f"traces      {traces['kept']} imitated, {traces['held_out']} held out; left out: {left_out or 'none'}")
    _print_notes(traces)
    if report["loss_before"] is None:
        typer.echo("held out    too few different prompts to hold some out; no loss on unseen ones")
    else:
        typer.echo(f"held out    loss {report['loss_before']:.3f} -> {report['loss_after']:.3f}")
    typer.echo(f"training    {report['steps']} steps, last loss {report['loss']:.3f}, {report['seconds']:.0f} s")
    typer.echo(f"written     {report['path']}")


def _print_notes(traces: Mapping[str, Any]) -> None:
    """What the model does not see of the data that it imitates."""
    for what, count in traces.get("notes", {}).items():
        typer.echo(f"note        {count} of {traces['rows']} rows: {_NOTE.get(what) or what.replace('_', ' ')}")
