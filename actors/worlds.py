"""Which world, task and seed a group plays: a pure function of the run's seed and the group's number.

So any worker can take any group, a resumed run goes on where the dispatch sequence stands, and all members and
retries of a group meet the same task and the same environment seed (P1).
"""

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from headrace.actors.environments.adapter import AsyncEnvironment, UnbuiltEnvironment, as_async
from headrace.actors.environments.registry import environment_kind
from headrace.platform.config.environments import EnvironmentConfig
from headrace.platform.contracts import Environment, TaskSource
from headrace.platform.records.message import Task
from headrace.platform.seeding import derive_seed

# Threads are made when a plain environment needs one; each blocked session takes one (case E11).
_MOST_BLOCKED = 1024


@dataclass(kw_only=True, slots=True)
class Setting:
    """What one group plays."""

    config: EnvironmentConfig
    task: Task
    seed: int


class Worlds:
    """The environments of a recipe, mixed by weight.

    Raises:
        NotFound: for an environment that is not registered.
        ConfigError: for arguments that it does not know.
    """

    def __init__(self, configs: Sequence[EnvironmentConfig], split: str, seed: int) -> None:
        self._configs = tuple(configs)
        self._seed = seed
        self._split = split
        self._weights = [config.weight for config in self._configs]
        self._kinds = {config.name: environment_kind(config.name) for config in self._configs}
        self._sources: dict[str, TaskSource] = {
            config.name: self._kinds[config.name].tasks(split, seed, config.args) for config in self._configs
        }
        self._threads = ThreadPoolExecutor(_MOST_BLOCKED, thread_name_prefix="environment")
        for config in self._configs:
            self.environment(config)  # wrong arguments are found before anything starts

    def setting(self, group: int) -> Setting:
        """What group number `group` plays."""
        rng = random.Random(derive_seed("mix", self._seed, self._split, group))
        (config,) = rng.choices(self._configs, self._weights)
        source = self._sources[config.name]
        source.restore(group)
        (task,) = source.next(1)
        return Setting(config=config, task=task, seed=task.seed or derive_seed("world", self._seed, self._split, group))

    def environment(self, config: EnvironmentConfig) -> Environment:
        """A fresh session of the world that `config` names."""
        return self._kinds[config.name].environment(config.args)

    def async_environment(self, config: EnvironmentConfig) -> AsyncEnvironment:
        """The same, with plain methods moved to a thread. Never raises: what cannot be built fails in `reset`."""
        try:
            return as_async(self.environment(config), self._threads)
        except Exception as error:  # foreign code: the episode's boundary judges it
            return UnbuiltEnvironment(config.name, error)
