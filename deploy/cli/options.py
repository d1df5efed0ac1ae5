"""Arguments that several commands share, and how they answer."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer

Recipe = Annotated[
    str, typer.Argument(help="A named recipe such as 'lookup', or the path of a YAML file.", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Settings to change, such as 'learner.lr=3e-4' or 'seed=1'.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object on the last line.")]
RunName = Annotated[
    str, typer.Argument(help="A run: its name, any unique prefix of it, or its path.", show_default=False)
]
RunsDir = Annotated[str, typer.Option("--runs-dir", help="The folder that holds run roots.")]


def recipes_dir() -> Path:
    """Where the named recipes lie."""
    return Path(str(files("headrace.deploy"))) / "recipes"


def answer_json(result: dict[str, Any]) -> None:
    """The last line of a command's output under `--json`."""
    typer.echo(json.dumps(result, default=str))
