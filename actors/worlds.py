"""Which world, task and seed a group plays: a pure function of the run's seed and the group's number.

So any worker can take any group, a resumed run goes on where the dispatch sequence stands, and all members and
retries of a group meet the same task and the same environment seed (P1). A success-window curriculum adds one more
thing that it depends on: what `Curriculum` was told. It chooses training tasks only; evaluation walks through its own
one after the other, and its first groups play every environment once in turn, before the weights count (see `Mixture`).
"""

import random
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from headrace.actors.environments.adapter import AsyncEnvironment, UnbuiltEnvironment, as_async
from headrace.actors.environments.doors.rows import check_first
from headrace.actors.environments.kind import EnvironmentKind
from headrace.actors.environments.registry import environment_kind
from headrace.actors.tasks import open_tasks
from headrace.actors.tasks.curriculum import CANDIDATES, Curriculum, check_level
from headrace.actors.tasks.generated import GeneratedTasks
from headrace.actors.tasks.mixture import Mixture
from headrace.platform.config.environments import EnvironmentConfig
from headrace.platform.config.tasks import CurriculumConfig
from headrace.platform.contracts import Environment, TaskSource
from headrace.platform.errors import ConfigError, EnvironmentFault
from headrace.platform.records.message import Task
from headrace.platform.seeding import derive_seed, split_seed

# Threads are made when a plain environment needs one; each blocked session takes one (case E11).
_MOST_BLOCKED = 1024
# How far ahead of an environment's own position the curriculum looks for other tasks.
_WINDOW = 4096


@dataclass(kw_only=True, slots=True)
class Setting:
    """What one group plays. `error` is what its task source raised; then the task is a stand-in."""

    config: EnvironmentConfig
    task: Task
    seed: int
    error: Exception | None = None


class Worlds:
    """The environments of a recipe, mixed by weight. May be used from several threads.

    Args:
        configs: each known by its `known_as`, which its tasks bear as their environment.
        split: "train", "dev" or "hidden".
        seed: the run's.
        curriculum: how to mix and choose; None for weights alone.

    Raises:
        NotFound: for an environment that is not registered.
        ConfigError: for arguments that it does not know, and for tasks that cannot be had.
    """

    def __init__(
        self,
        configs: Sequence[EnvironmentConfig],
        split: str,
        seed: int,
        curriculum: CurriculumConfig | None = None,
    ) -> None:
        curriculum = curriculum or CurriculumConfig()
        self._configs = tuple(configs)
        self._seed = seed
        self._split = split
        uniform = curriculum.kind == "uniform"
        self._mixture = Mixture([1.0 if uniform else config.weight for config in self._configs], seed, split)
        self._kinds = {config.known_as: environment_kind(config.name) for config in self._configs}
        self._sources = {
            config.known_as: _tasks(config, self._kinds[config.known_as], split, seed) for config in self._configs
        }
        self._turn = threading.Lock()  # sources have a position
        self.curriculum = self._curriculum(curriculum)
        self._threads = ThreadPoolExecutor(_MOST_BLOCKED, thread_name_prefix="environment")
        self.versions: dict[str, set[str]] = {}
        """Environment versions by the environment's own name: what episodes of this recipe come from (P17)."""
        for config in self._configs:  # wrong arguments are found before anything starts
            try:
                environment = self.environment(config)
            except EnvironmentFault as error:
                raise ConfigError(f"environments.{config.known_as} cannot be made: {error}") from error
            self.versions.setdefault(environment.name, set()).add(environment.version)

    def setting(self, group: int) -> Setting:
        """What group number `group` plays. Raises whatever a task source raises."""
        number, position = self._mixture.place(group)
        config = self._configs[number]
        with self._turn:
            task = self._chosen(config.known_as, position, group)
        return Setting(config=config, task=task, seed=task.seed or split_seed(self._split, "world", self._seed, group))

    def made_setting(self, group: int) -> Setting:
        """The same, but what a task source raises is part of the setting: its session raises it in `reset`."""
        try:
            return self.setting(group)
        except Exception as error:  # foreign code: the episode's boundary judges it
            number, _ = self._mixture.place(group)
            config = self._configs[number]
            task = Task(f"unmade-{self._split}-{group}", config.known_as, split=self._split)
            seed = split_seed(self._split, "world", self._seed, group)
            return Setting(config=config, task=task, seed=seed, error=error)

    def may_block(self, group: int) -> bool:
        """Whether somebody else's code makes what `group` plays."""
        number, _ = self._mixture.place(group)
        source = self._sources[self._configs[number].known_as]
        return isinstance(source, GeneratedTasks) or not type(source).__module__.startswith("headrace.")

    def distinct(self, groups: Iterable[int]) -> list[int]:
        """Those of `groups` at which no environment begins its tasks anew, so that evaluation plays each task once.

        Only sources that say how many tasks they have, by `len`, begin anew.
        """
        sizes = [_size(self._sources[config.known_as]) for config in self._configs]
        kept = []
        for group in groups:
            number, position = self._mixture.place(group)
            size = sizes[number]
            if size is None or position < size:
                kept.append(group)
        return kept

    def environment(self, config: EnvironmentConfig) -> Environment:
        """A fresh session of the world that `config` names."""
        return self._kinds[config.known_as].environment(config.args)

    def async_environment(self, config: EnvironmentConfig) -> AsyncEnvironment:
        """The same, with plain methods moved to a thread. Never raises: what cannot be built fails in `reset`."""
        try:
            return as_async(self.environment(config), self._threads)
        except Exception as error:  # foreign code: the episode's boundary judges it
            return UnbuiltEnvironment(config.known_as, error)

    def session(self, setting: Setting) -> AsyncEnvironment:
        """The world of a setting, ready for its task. Never raises."""
        if setting.error is not None:
            return UnbuiltEnvironment(setting.config.known_as, setting.error)
        return self.async_environment(setting.config)

    def _curriculum(self, config: CurriculumConfig) -> Curriculum | None:
        if self._split != "train" or config.kind != "success_window":
            return None
        if config.level:
            check_level(config.level, [self._task(name, 0) for name in self._sources])
        return Curriculum(config)

    def _task(self, environment: str, position: int) -> Task:
        source = self._sources[environment]
        source.restore(position)
        (task,) = source.next(1)
        return task if task.environment == environment else msgspec.structs.replace(task, environment=environment)

    def _chosen(self, environment: str, position: int, group: int) -> Task:
        """The task at the environment's position, or one near it that the curriculum prefers."""
        task = self._task(environment, position)
        if self.curriculum is None:
            return task
        dice = random.Random(derive_seed("curriculum", self._seed, group))
        for _ in range(CANDIDATES - 1):
            if self.curriculum.admits(environment, self.curriculum.key(task), dice.random()):
                break
            task = self._task(environment, position + 1 + dice.randrange(_WINDOW))
        return task


def _size(source: TaskSource) -> int | None:
    """How many tasks a source has before it begins anew, None where it does not say."""
    try:
        return len(source) or None  # type: ignore[arg-type]
    except Exception:  # it has no length, or is foreign code that cannot tell
        return None


def _tasks(config: EnvironmentConfig, kind: EnvironmentKind, split: str, seed: int) -> TaskSource:
    """The recipe's tasks, else the environment's own."""
    if config.tasks is not None:
        _check_used(config, kind)
        source = open_tasks(config.tasks, split, seed, config.known_as)
        if kind.check_row is not None and config.scorer is None:
            check_first(source, kind.check_row, f"environments.{config.known_as}.tasks")
        return source
    if kind.tasks is None:
        raise ConfigError(
            f"the environment {config.known_as} brings no tasks; give it some in the recipe, such as"
            " `tasks: {source: ./tasks.jsonl}`"
        )
    return kind.tasks(split, seed, config.args)


def _check_used(config: EnvironmentConfig, kind: EnvironmentKind) -> None:
    """Refuse args that only tell the environment's own tasks something, where they are not played."""
    known = kind.environment_args
    unused = [key for key in config.args if known is not None and key not in known]
    if unused:
        raise ConfigError(
            f"environments.{config.known_as}.args: {', '.join(unused)} would not be used, for the recipe names other"
            f" `tasks`; what a generator should get belongs into tasks.args, and args may have"
            f" {', '.join(known or ()) or 'nothing'}"
        )
