"""What a host plays: one environment with its settings, and the tasks of one split for clients that bring none."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from headrace.actors.environments.adapter import AsyncEnvironment, UnbuiltEnvironment, as_async
from headrace.actors.environments.registry import environment_kind
from headrace.actors.environments.sandboxed import SandboxedEnvironment
from headrace.actors.frames import described
from headrace.actors.remote.openenv_kind import OpenEnvElsewhere
from headrace.actors.targets import is_target, load_target
from headrace.actors.world_resources import WorldResources
from headrace.platform.config.sandbox import SandboxConfig
from headrace.platform.contracts import Environment, TaskSource
from headrace.platform.errors import ConfigError, EnvironmentFault
from headrace.platform.records.message import Task
from headrace.platform.seeding import split_seed


class Offer:
    """Makes sessions of one environment.

    Args:
        target: a registered name, `./file.py:Name` or `package.module:Name`.
        args: the environment's.
        sandbox: the box that its tools run in, None for the environment's own choice.
        split: the tasks of clients that name only a number.
        seed: of these tasks.
        state: where sandboxes keep their files; None for this node's cache.

    Raises:
        NotFound: there is no such environment.
        ConfigError: it cannot be made like this, or no sandbox that is accepted works here.
    """

    def __init__(
        self,
        target: str,
        args: dict[str, Any],
        sandbox: SandboxConfig | None = None,
        split: str = "train",
        seed: int = 0,
        state: Path | None = None,
    ) -> None:
        self.target = target.rpartition("/")[2]
        self.description = _described(target)
        self._kind, self._args, self._sandbox = environment_kind(target), args, sandbox
        self._split, self._seed = split, seed
        self._resources = WorldResources(state)
        self._turn = threading.Lock()  # a source has a position
        self._tasks: TaskSource | None = None
        try:
            probe = self._environment()
        except EnvironmentFault as error:
            raise ConfigError(f"{self.target} cannot be made: {error}") from error
        if isinstance(probe, OpenEnvElsewhere):
            raise ConfigError(
                "openenv stands for servers of their own, and a host of headrace's cannot play it; give a recipe's"
                " environment their addresses: `pool: {hosts: [ws://HOST:PORT], protocol: openenv}`"
            )
        self.name, self.version = probe.name, probe.version

    @property
    def threads(self) -> ThreadPoolExecutor:
        """Where whatever may block is to be called."""
        return self._resources.threads

    def session(self) -> AsyncEnvironment:
        """A fresh session; may block. Never raises: what cannot be built fails in its `reset`."""
        try:
            return as_async(self._environment(), self._resources.threads)
        except SystemExit as error:
            return UnbuiltEnvironment(self.name, EnvironmentFault(described(error), transient=False))
        except Exception as error:  # foreign code: the session tells its client
            return UnbuiltEnvironment(self.name, error)

    def task(self, number: int) -> tuple[Task, int]:
        """Task `number` of the split and its world's seed; may block. Raises ConfigError where there is none."""
        with self._turn:
            if self._tasks is None:
                if self._kind.tasks is None:
                    raise ConfigError(f"{self.target} brings no tasks; reset must carry a task")
                self._tasks = self._kind.tasks(self._split, self._seed, self._args)
            self._tasks.restore(number)
            (task,) = self._tasks.next(1)
        return task, task.seed or split_seed(self._split, "world", self._seed, number)

    async def close(self) -> None:
        """End every sandbox."""
        await self._resources.close()

    def _environment(self) -> Environment:
        if self._sandbox is None:
            environment = self._kind.environment(self._args)
        elif self._kind.sandboxed is not None:
            environment = self._kind.sandboxed(self._args)
        else:
            raise ConfigError(
                f"{self.target} runs nothing that could be put into a sandbox; leave --sandbox out, or derive it from"
                " headrace.SandboxedEnvironment"
            )
        if isinstance(environment, SandboxedEnvironment):
            environment.use_sandboxes(self._resources.sandboxes(self._sandbox or SandboxConfig()))
        return environment


def _described(target: str) -> str:
    """The first paragraph of what its author wrote about it."""
    text = load_target(target)[0].__doc__ if is_target(target) and not target.startswith("reasoning_gym:") else ""
    return (text or f"The environment {target}.").strip().partition("\n\n")[0]
