"""Which world, task and seed a group plays: a pure function of the run's seed and the group's number.

So any worker can take any group, a resumed run goes on where the dispatch sequence stands, and all members and
retries of a group meet the same task and the same environment seed (P1). A success-window curriculum adds one more
thing that it depends on: what `Curriculum` was told. It chooses training tasks only; evaluation walks through its own
one after the other, and its first groups play every environment once in turn, before the weights count (see `Mixture`).
"""

import asyncio
import random
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from headrace.actors.environments.adapter import AsyncEnvironment, UnbuiltEnvironment, as_async
from headrace.actors.environments.doors.rows import check_first
from headrace.actors.environments.faulty import check_faults, with_faults, with_recorded_faults
from headrace.actors.environments.kind import EnvironmentKind
from headrace.actors.environments.late import LateEnvironment
from headrace.actors.environments.off_loop import OffLoop
from headrace.actors.environments.registry import environment_kind
from headrace.actors.environments.sandboxed import SandboxedEnvironment
from headrace.actors.frames import described
from headrace.actors.gateway.checking import check_host, check_policy
from headrace.actors.gateway.guard import GuardedEnvironment
from headrace.actors.gateway.permissions import policy_of
from headrace.actors.harness.environment import HARNESS
from headrace.actors.oracle import Demonstrate, OracleVerdict, demonstration_of, oracle_verdict
from headrace.actors.quarantine import Quarantine, first_not_out
from headrace.actors.remote.group_version import GroupVersion
from headrace.actors.tasks import open_tasks
from headrace.actors.tasks.curriculum import CANDIDATES, Curriculum, check_level
from headrace.actors.tasks.generated import GeneratedTasks
from headrace.actors.tasks.mixture import Mixture
from headrace.actors.world_resources import WorldResources
from headrace.platform.config.environments import EnvironmentConfig
from headrace.platform.config.gateway import BOXED_TOOLS
from headrace.platform.config.sandbox import SandboxConfig
from headrace.platform.config.tasks import CurriculumConfig
from headrace.platform.contracts import Environment, SandboxProvider, TaskSource
from headrace.platform.errors import ConfigError, EnvironmentFault, NotFound, RunFailed
from headrace.platform.ledger.policy import EPOCH_ATTEMPTS
from headrace.platform.records.episode import Episode
from headrace.platform.records.ids import AttemptId
from headrace.platform.records.message import Task
from headrace.platform.records.status import Purpose
from headrace.platform.seeding import derive_seed, split_seed

# How far ahead of an environment's own position the curriculum looks for other tasks.
_WINDOW = 4096


@dataclass(kw_only=True, slots=True)
class Setting:
    """What one group plays. `error` is what its task source raised; then the task is a stand-in. `version` is that of
    the environment, once the first of the group is connected to a host."""

    config: EnvironmentConfig
    task: Task
    seed: int
    error: Exception | None = None
    version: GroupVersion = field(default_factory=GroupVersion, compare=False)


class Worlds:
    """The environments of a recipe, mixed by weight. May be used from several threads.

    Args:
        configs: each known by its `known_as`, which its tasks bear as their environment.
        split: "train", "dev" or "hidden".
        seed: the run's.
        curriculum: how to mix and choose; None for weights alone.
        resources: what the environments stand on, shared with the worlds of other splits; whoever plays closes it.

    Raises:
        NotFound: for an environment that is not registered.
        ConfigError: for arguments that it does not know, tasks that cannot be had, faults that cannot be put in, a
            sandbox that it has no use for, mounts that are none, and permissions that name no tool that there is.
    """

    def __init__(
        self,
        configs: Sequence[EnvironmentConfig],
        split: str,
        seed: int,
        curriculum: CurriculumConfig | None = None,
        resources: WorldResources | None = None,
    ) -> None:
        curriculum = curriculum or CurriculumConfig()
        self.resources = resources or WorldResources()
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
        self.quarantine = Quarantine()
        self._policies = {config.known_as: policy_of(config) for config in self._configs}
        self._identities: dict[str, tuple[str, str]] = {}
        self.versions: dict[str, set[str]] = {}
        """Environment versions by the environment's own name: what episodes of this recipe come from (P17). Hosts that
        may bring any version are not among them."""
        for config in self._configs:  # wrong arguments are found before anything starts
            self._check(config)

    def setting(self, group: int) -> Setting:
        """What group number `group` plays. Raises whatever a task source raises, and RunFailed where every task is in
        quarantine."""
        number, position = self._mixture.place(group)
        config = self._configs[number]
        with self._turn:
            task = self._chosen(config.known_as, position, group)
        return Setting(config=config, task=task, seed=task.seed or split_seed(self._split, "world", self._seed, group))

    def made_setting(self, group: int) -> Setting:
        """The same, but what a task source raises is part of the setting: its session raises it in `reset`.

        Raises:
            RunFailed: every task is in quarantine.
        """
        try:
            return self.setting(group)
        except RunFailed:
            raise
        except Exception as error:  # foreign code: the episode's boundary judges it
            number, _ = self._mixture.place(group)
            config = self._configs[number]
            task = Task(f"unmade-{self._split}-{group}", config.known_as, split=self._split)
            seed = split_seed(self._split, "world", self._seed, group)
            return Setting(config=config, task=task, seed=seed, error=error)

    def may_differ(self, group: int) -> bool:
        """Whether what `group` plays may not be what it played when it was first asked for: the curriculum has learned,
        or its own task was put into quarantine."""
        if self.curriculum is not None or not self.quarantine.rows():
            return self.curriculum is not None
        number, position = self._mixture.place(group)
        name = self._configs[number].known_as
        with self._turn:
            return self.quarantine.is_out(name, self._task(name, position))

    async def verdict_on(self, environment: str, task: Task, seed: int) -> OracleVerdict:
        """What the environment's own demonstration says of a task: see `oracle_verdict`. Nobody's faults are put in."""
        config = next(each for each in self._configs if each.known_as == environment)
        shown = await self._demonstration(config) if config.pool is None else None
        if config.sandbox is not None and config.sandbox.max_boxes:  # its box is not one of the episodes' (P21)
            config = config.model_copy(update={"sandbox": config.sandbox.model_copy(update={"max_boxes": 0})})
        make = partial(self.async_environment, config)
        return await oracle_verdict(make, task, seed, shown, config.reset_deadline_s, config.step_deadline_s)

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
        """A fresh session of the world that `config` names, played in this process."""
        kind = self._kinds[config.known_as]
        if config.sandbox is not None and kind.sandboxed is not None:
            return kind.sandboxed(config.args)
        if config.sandbox is not None and not _has_boxed_tools(config):
            raise ConfigError(
                f"environments.{config.known_as}.sandbox: it runs nothing that could be put into a sandbox; leave it"
                " out, mount tools that can (`tools: [shell]`), or derive the environment from"
                " headrace.SandboxedEnvironment"
            )
        return kind.environment(config.args)

    def open_resources(self) -> None:
        """Make sure that this host has what the environments stand on, before the first episode is played here.

        Raises:
            ConfigError: no sandbox that the recipe accepts works here, a secret is not there, or what a mounted tool
                or an approval needs.
        """
        for config in self._configs:
            check_host(self._policies[config.known_as], config.known_as)
            if config.pool is not None:
                self.resources.pool(config)
            elif isinstance(self.environment(config), SandboxedEnvironment):
                self.resources.sandboxes(config.sandbox or SandboxConfig())
            self._boxes(config)

    def async_environment(self, config: EnvironmentConfig) -> AsyncEnvironment:
        """A fresh session behind the gateway, wherever it is played. Never raises: what cannot be built fails in
        `reset`."""
        return self._guarded(config, self._played(config, GroupVersion()))

    def _played(self, config: EnvironmentConfig, group: GroupVersion) -> AsyncEnvironment:
        """The same, not guarded yet, with all that may block moved to a thread; somebody else's code is built there, by
        the first reset (case E11). Sessions that share `group` are played in one version of the environment (P17)."""
        if config.pool is not None:
            try:
                pool = self.resources.pool(config)
            except Exception as error:  # a token that is not there any more: the episode's boundary judges it
                return UnbuiltEnvironment(config.known_as, error)
            return pool.session(group, config.reset_deadline_s, config.step_deadline_s)
        build = partial(self._built, config)
        if not self._kinds[config.known_as].digest:  # headrace's own, whose constructors do not block
            return build()
        return LateEnvironment(*self._identities[config.known_as], build, self.resources.builder)

    def session(self, setting: Setting, attempt: AttemptId | None = None) -> AsyncEnvironment:
        """The world of a setting, ready for its task; a training attempt meets the recipe's faults. Never raises."""
        config = setting.config
        if setting.error is not None:
            return UnbuiltEnvironment(config.known_as, setting.error)
        session = self._played(config, setting.version)
        if not config.faults or attempt is None or attempt.purpose is not Purpose.TRAIN:
            return self._guarded(config, session)
        seed = derive_seed("faults", self._seed, attempt.group, attempt.sample, attempt.attempt)
        session = with_faults(session, config.faults, seed, first=attempt.attempt % EPOCH_ATTEMPTS == 0)
        return self._guarded(config, session)

    def config_of(self, episode: Episode) -> EnvironmentConfig:
        """The environment that a stored episode was played in. Raises NotFound where the recipe has no such."""
        for config in self._configs:
            if config.known_as == episode.task.environment:
                return config
        raise NotFound(f"{episode.episode_id} was played in {episode.task.environment!r}, not in the run's recipe")

    async def session_of(self, episode: Episode) -> AsyncEnvironment:
        """A session in which a stored episode can be played again, with the faults that it met. It is built already,
        since it gets its cassette before its reset; what took longer than a reset may fails there.

        Raises:
            NotFound: the recipe has no such environment, or a harness played it.
        """
        config = self.config_of(episode)
        if config.name == HARNESS:
            raise NotFound(f"{episode.episode_id} was played by a harness outside of headrace; it cannot be run again")
        session = self._played(config, GroupVersion(version=episode.environment_version))
        if isinstance(session, LateEnvironment):
            session = await session.built_within(config.reset_deadline_s)
        if episode.injected_faults:
            session = with_recorded_faults(session, episode.injected_faults)
        return self._guarded(config, session)

    def _guarded(self, config: EnvironmentConfig, session: AsyncEnvironment) -> AsyncEnvironment:
        """`session` behind the gateway: whatever is played goes through here."""
        policy = self._policies[config.known_as]
        try:
            boxes = self._boxes(config)
        except ConfigError as error:  # no sandbox works here any more: the episode's boundary judges it
            return UnbuiltEnvironment(config.known_as, error)
        return GuardedEnvironment(session, policy, self.resources.gateway, boxes, config.step_deadline_s)

    def _boxes(self, config: EnvironmentConfig) -> SandboxProvider | None:
        """Who makes boxes for tools that are mounted beside an environment. Raises ConfigError where nobody can."""
        if not _has_boxed_tools(config):
            return None
        return self.resources.sandboxes(config.sandbox or SandboxConfig())

    def _check(self, config: EnvironmentConfig) -> None:
        """What is wrong with an environment is said before anything starts. Raises ConfigError."""
        if config.pool is not None:
            check_policy(self._policies[config.known_as], None, config.known_as)
            check_faults(config.faults, can_kill=False)
            if config.pool.versions:
                self.versions.setdefault(config.name, set()).update(config.pool.versions)
            return
        try:
            environment = self.environment(config)
        except EnvironmentFault as error:
            raise ConfigError(f"environments.{config.known_as} cannot be made: {error}") from error
        check_policy(self._policies[config.known_as], environment, config.known_as)
        check_faults(config.faults, can_kill=isinstance(environment, SandboxedEnvironment))
        self._identities[config.known_as] = environment.name, environment.version
        self.versions.setdefault(environment.name, set()).add(environment.version)

    def _built(self, config: EnvironmentConfig) -> AsyncEnvironment:
        """A session that is played in this process. Never raises."""
        try:
            environment = self.environment(config)
            if isinstance(environment, SandboxedEnvironment):
                environment.use_sandboxes(self.resources.sandboxes(config.sandbox or SandboxConfig()))
            return as_async(environment, self.resources.threads)
        except SystemExit as error:  # it would end the event loop, and with it every other session
            return UnbuiltEnvironment(config.known_as, EnvironmentFault(described(error), transient=False))
        except Exception as error:  # foreign code: the episode's boundary judges it
            return UnbuiltEnvironment(config.known_as, error)

    async def _demonstration(self, config: EnvironmentConfig) -> Demonstrate | None:
        """What the environment itself has to show; None where it has nothing, or cannot be built in time."""

        def shown() -> Demonstrate | None:
            try:
                return demonstration_of(self.environment(config))
            except (Exception, SystemExit):  # foreign code: its sessions say in `reset` what is wrong with it
                return None

        try:
            async with asyncio.timeout(config.reset_deadline_s):
                return await OffLoop(self.resources.threads).call(shown)
        except TimeoutError:
            return None

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
        """The task at the environment's position, or one near it where that is in quarantine or the curriculum prefers
        another."""
        if self._split != "train":
            return self._task(environment, position)
        dice = random.Random(derive_seed("curriculum", self._seed, group))
        candidates = self._candidates(environment, position, dice)
        task = first_not_out(self.quarantine, environment, candidates)
        if self.curriculum is None:
            return task
        for _ in range(CANDIDATES - 1):
            if self.curriculum.admits(environment, self.curriculum.key(task), dice.random()):
                break
            task = first_not_out(self.quarantine, environment, candidates)
        return task

    def _candidates(self, environment: str, position: int, dice: random.Random) -> Iterator[Task]:
        yield self._task(environment, position)
        while True:
            yield self._task(environment, position + 1 + dice.randrange(_WINDOW))


def _has_boxed_tools(config: EnvironmentConfig) -> bool:
    return any(tool.kind in BOXED_TOOLS for tool in config.tools)


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
