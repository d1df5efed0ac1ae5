"""`headrace env new`: a small working environment to begin with, written from a template.

Owns the names: `NAME` becomes `name.py` with an object `Name`, beside its data. Nothing is overwritten, and a file that
would hide a module that something imports is refused.
"""

import keyword
import re
import sys
from enum import StrEnum
from importlib.metadata import packages_distributions
from importlib.resources import files
from pathlib import Path

import jinja2

from headrace.platform.errors import ConfigError


class DoorName(StrEnum):
    """The doors for environment authors."""

    REWARD = "reward"
    TOOLS = "tools"
    ENVIRONMENT = "environment"


def write_environment(name: str, door: DoorName, folder: Path) -> tuple[str, list[Path]]:
    """Write the template of `door`.

    Args:
        name: in snake or camel case; `word_game` and `WordGame` both make `word_game.py` with `WordGame`.
        folder: where to; made if it does not exist.

    Returns:
        The environment's target, such as `games/word_game.py:WordGame`, and the files that were written.

    Raises:
        ConfigError: the name cannot be that of a module, or a file is there already.
    """
    module, title = _names(name)
    templates = Path(str(files("headrace.deploy"))) / "environment_template"
    texts = {
        folder / path.name.removesuffix(".jinja").replace(door, module): path.read_text()
        for path in sorted(templates.glob(f"{door}.*.jinja"))
    }
    if there := [str(path) for path in texts if path.exists()]:
        raise ConfigError(f"{' and '.join(there)} is there already, and nothing is overwritten; choose another name")
    folder.mkdir(parents=True, exist_ok=True)
    jinja = jinja2.Environment(keep_trailing_newline=True, undefined=jinja2.StrictUndefined)
    for path, text in texts.items():
        path.write_text(jinja.from_string(text).render(module=module, title=title))
    return f"{folder / module}.py:{title}", list(texts)


def _names(name: str) -> tuple[str, str]:
    """Module and object of an environment. Raises ConfigError."""
    module = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.replace("-", "_")).lower()
    if not re.fullmatch(r"[a-z][a-z0-9_]*", module) or keyword.iskeyword(module):
        raise ConfigError(f"{name!r} cannot be the name of a Python file; use letters, digits and _, such as word_game")
    if module in {"headrace", *sys.stdlib_module_names, *packages_distributions()}:
        raise ConfigError(f"{module}.py would hide the module {module!r}, which is installed; choose another name")
    return module, "".join(part[:1].upper() + part[1:] for part in module.split("_"))
