"""What can be known to be wrong before anything starts, beyond what the configuration knows of itself (case V4)."""

from pathlib import Path

from headrace.actors.worlds import Worlds
from headrace.platform.config import RunConfig
from headrace.platform.config.secret_references import resolve
from headrace.platform.errors import ConfigError


def check_config(config: RunConfig) -> None:
    """Refuse a recipe that cannot run here.

    Raises:
        ConfigError: it joins a cluster without a server for it, knows an environment's arguments wrongly, or names a
            model folder that does not hold one.
        NotFound: it names an environment that is not registered.
    """
    check_cluster(config)
    Worlds(config.environments, "train", config.seed)
    folder = config.model.path
    if folder and not (Path(folder) / "config.json").is_file():
        raise ConfigError(f"model.path: {folder} is not a Hugging Face folder: it holds no config.json")


def check_cluster(config: RunConfig) -> None:
    """Refuse a joined cluster without a server that its nodes can reach. Raises ConfigError."""
    if config.runtime.ray_address and not config.queue.redis_url:
        raise ConfigError(
            "runtime.ray_address joins a cluster, whose nodes cannot reach an embedded server;"
            " set queue.redis_url to a server that they all reach"
        )


def check_secrets(config: RunConfig) -> None:
    """Refuse references to secrets that are not there. Raises ConfigError that names them."""
    resolve(config.queue.redis_url)
