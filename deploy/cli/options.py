"""Arguments that several commands share, and how they answer."""

import json
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from headrace.platform.config.sandbox import SandboxConfig

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
SandboxText = Annotated[
    str, typer.Option("--sandbox", help="The box that its tools run in: a mode such as bubblewrap, or JSON.")
]
LearnerStep = Annotated[
    int | None, typer.Argument(help="A learner step, from 1; the last one, if left out.", min=1, show_default=False)
]
BeginAt = Annotated[
    int | None,
    typer.Option("--from", metavar="VERSION", help="Begin at this version's checkpoint. Default: the newest one."),
]
RunsDir = Annotated[str, typer.Option("--runs-dir", help="The folder that holds run roots.")]


def recipes_dir() -> Path:
    """Where the named recipes lie."""
    return Path(str(files("headrace.deploy"))) / "recipes"


def json_object(option: str, text: str) -> dict[str, Any]:
    """The JSON object that was given as `option`. Raises ConfigError."""
    from headrace.platform.errors import ConfigError

    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{option} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{option} must be a JSON object, such as '{{\"size\": 4}}', not {text}")
    return value


def sandbox_config(text: str) -> "SandboxConfig | None":
    """What --sandbox says; None where it says nothing. Raises ConfigError."""
    from pydantic import ValidationError

    from headrace.platform.config.sandbox import SandboxConfig
    from headrace.platform.errors import ConfigError

    if not text:
        return None
    try:
        return SandboxConfig.model_validate(json_object("--sandbox", text) if text.startswith("{") else text)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise ConfigError(f"--sandbox {problems}") from None


def answer_json(result: dict[str, Any]) -> None:
    """The last line of a command's output under `--json`."""
    typer.echo(json.dumps(result, default=str))
