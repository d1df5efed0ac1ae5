"""The packages behind the loggers: extras that are imported when a run asks for them, and not before."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from headrace.platform.errors import ConfigError


def require(package: str) -> None:
    """Refuse a logger whose package is not installed, without importing it.

    A folder of that name in the working directory is no package: W&B leaves one called `wandb`.

    Raises:
        ConfigError: names the command that installs it. The extra is called like the package.
    """
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"loggers: {package} is asked for but not installed; run: pip install 'headrace[{package}]',"
            " or take it out of `loggers`"
        )


def load(module: str) -> Any:
    """The module, without its types, as it may not be there when types are checked."""
    return import_module(module)
