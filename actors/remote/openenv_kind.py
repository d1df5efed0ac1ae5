"""The environment kind `openenv`: whatever a stock OpenEnv server plays. Its tasks are seeds.

A recipe names it with a pool: `{name: openenv, pool: {hosts: [ws://…], protocol: openenv}, args: {…}}`.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

from headrace.actors.environments.kind import EnvironmentKind
from headrace.actors.remote.openenv import OpenEnvForm, form_of
from headrace.platform.contracts import Environment
from headrace.platform.errors import ConfigError, EnvironmentFault
from headrace.platform.records.message import Message, Task, ToolSpec
from headrace.platform.seeding import derive_seed

# The splits draw seeds that leave different remainders, so that no task of one is in another (case V2).
_SPLITS = ("train", "dev", "hidden")
# Servers hand the seed to numpy and the like, which take 32 bits.
_DRAWN = 2**31 // len(_SPLITS)


class OpenEnvTasks:
    """An endless, seeded `TaskSource`: `data` is what `reset` is given.

    Args:
        split: "train", "dev" or "hidden".
        seed: the run's seed.

    Raises:
        ConfigError: for an unknown split.
    """

    def __init__(self, split: str, seed: int) -> None:
        if split not in _SPLITS:
            raise ConfigError(f"openenv has no split {split!r}; known: {', '.join(_SPLITS)}")
        self.split = split
        self.state = 0
        self._seed = seed

    def restore(self, state: int) -> None:
        """See `TaskSource.restore`."""
        self.state = state

    def next(self, n: int) -> Sequence[Task]:
        """See `TaskSource.next`."""
        tasks = [self._draw(self.state + offset) for offset in range(n)]
        self.state += n
        return tasks

    def _draw(self, position: int) -> Task:
        drawn = derive_seed("openenv", self._seed, self.split, position) % _DRAWN
        seed = drawn * len(_SPLITS) + _SPLITS.index(self.split)
        return Task(f"openenv-{self.split}-{position}", "openenv", data={"seed": seed}, split=self.split, seed=seed)


class OpenEnvElsewhere:
    """Stands for a world that only servers play: whoever plays it here is told so."""

    name = "openenv"

    def __init__(self, form: OpenEnvForm) -> None:
        self.version = form.version or "unknown"

    def tools(self) -> Sequence[ToolSpec]:
        """None."""
        return ()

    def reset(self, task: Task, seed: int) -> NoReturn:
        """Raises EnvironmentFault."""
        raise self._fault()

    def step(self, message: Message, key: str) -> NoReturn:
        """Raises EnvironmentFault."""
        raise self._fault()

    def snapshot(self) -> NoReturn:
        """Raises EnvironmentFault."""
        raise self._fault()

    def restore(self, snapshot_id: str) -> NoReturn:
        """Raises EnvironmentFault."""
        raise self._fault()

    def clone(self) -> NoReturn:
        """Raises EnvironmentFault."""
        raise self._fault()

    def close(self) -> None:
        """Nothing to release."""

    def _fault(self) -> EnvironmentFault:
        how = "pool: {hosts: [ws://HOST:PORT], protocol: openenv}"
        return EnvironmentFault(f"openenv is played by servers; give the recipe's environment `{how}`", transient=False)


def _environment(args: dict[str, Any]) -> Environment:
    return OpenEnvElsewhere(form_of(args))


OPENENV = EnvironmentKind(environment=_environment, tasks=lambda split, seed, args: OpenEnvTasks(split, seed))
