"""What most environments need: keyed idempotent steps, an end that is an end, snapshots by re-execution.

An environment derives from `ReplayedEnvironment` and writes `tools`, `_reset` and `_step`, plain or async. The base
keeps the log of what was done, so that `snapshot`, `restore` and `clone` work by deterministic re-execution
(docs/design.md section 5), and answers a repeated key from its table (P25). The price is one re-execution per restore;
a world that can copy its state cheaply overrides them.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Self, cast

from headrace.actors.environments.answers import checked_observation, checked_step
from headrace.actors.environments.off_loop import OffLoop
from headrace.platform.contracts import MaybeAwaitable
from headrace.platform.errors import EnvironmentFault
from headrace.platform.records.message import Message, Observation, StepResult, Task, ToolSpec


@dataclass(slots=True)
class _Past:
    """What the base remembers of a session; one attribute, so that a subclass can name its own as it likes."""

    made_with: tuple[tuple[Any, ...], dict[str, Any]]
    task: Task | None = None
    seed: int = 0
    log: list[Message] = field(default_factory=list)
    results: dict[str, tuple[Message, StepResult]] = field(default_factory=dict)
    snapshots: dict[str, tuple[Message, ...]] = field(default_factory=dict)
    ended: bool = False


class ReplayedEnvironment(ABC):
    """A session whose past can be played again.

    `_reset` and `_step` must depend on nothing but the constructor's arguments, the task, the seed and the messages.
    """

    name: str
    version: str

    _past: _Past
    _off_loop: OffLoop
    # Looked up once a class, for they are asked for at every step.
    _step_is_async: bool
    _is_foreign: bool

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._step_is_async = inspect.iscoroutinefunction(cls._step)
        cls._is_foreign = not cls.__module__.startswith("headrace.")

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Set up the past here, so that a subclass need not call `super().__init__()`."""
        self = super().__new__(cls)
        self._past = _Past((args, kwargs))
        self._off_loop = OffLoop()
        return self

    def __init__(self) -> None:
        """Take no arguments, where a subclass has no constructor of its own."""
        super().__init__()

    @abstractmethod
    def tools(self) -> Sequence[ToolSpec]:
        """The tools on offer."""

    @abstractmethod
    def _reset(self, task: Task, seed: int) -> MaybeAwaitable[Observation]:
        """Begin the world anew; called any number of times. May be plain or async."""

    @abstractmethod
    def _step(self, message: Message) -> MaybeAwaitable[StepResult]:
        """Act on the world; called once per key. May be plain or async."""

    def _fresh(self) -> "ReplayedEnvironment":
        """A new session with the same settings, not yet reset: by default made with the same arguments."""
        args, kwargs = self._past.made_with
        return type(self)(*args, **kwargs)

    def use_threads(self, executor: ThreadPoolExecutor) -> None:
        """Run what is plain here, rather than in the event loop's own pool."""
        self._off_loop = OffLoop(executor)

    async def reset(self, task: Task, seed: int) -> Observation:
        """See `Environment.reset`."""
        past = self._past
        past.task, past.seed = task, seed
        past.log.clear()
        past.results.clear()
        past.ended = False
        return checked_observation(await self._off_loop.call(self._reset, task, seed), self._reset)

    async def step(self, message: Message, key: str) -> StepResult:
        """See `Environment.step`.

        Raises:
            EnvironmentFault: before `reset`, after the end, or for a known key with another message (P25).
        """
        past = self._past
        if key in past.results:
            known, result = past.results[key]
            if known != message:
                raise EnvironmentFault(f"key {key!r} was used for another message", transient=False)
            return result
        if past.task is None or past.ended:
            what = "before reset" if past.task is None else "after the end"
            raise EnvironmentFault(f"{self.name}: step {what} of the episode", transient=False)
        if self._step_is_async:
            result = await cast(Awaitable[StepResult], self._step(message))
        else:
            result = await self._off_loop.call(self._step, message)
        if self._is_foreign:
            result = checked_step(result, self._step)
        past.log.append(message)
        past.results[key] = (message, result)
        past.ended = result.terminated or result.truncated
        return result

    async def snapshot(self) -> str:
        """See `Environment.snapshot`. The id names a point of this session's log."""
        past = self._past
        snapshot_id = f"{self.name}-step-{len(past.log)}-{len(past.snapshots)}"
        past.snapshots[snapshot_id] = tuple(past.log)
        return snapshot_id

    async def restore(self, snapshot_id: str) -> None:
        """See `Environment.restore`.

        Raises:
            EnvironmentFault: for a snapshot that this session did not make.
        """
        if snapshot_id not in self._past.snapshots:
            raise EnvironmentFault(f"{self.name} has no snapshot {snapshot_id!r}", transient=False)
        await self._play(self._past.snapshots[snapshot_id])

    async def clone(self) -> "ReplayedEnvironment":
        """See `Environment.clone`."""
        twin, past = self._fresh(), self._past
        twin._past.task, twin._past.seed = past.task, past.seed
        twin._off_loop = OffLoop(self._off_loop.executor)
        if past.task is not None:
            await twin._play(tuple(past.log))
        return twin

    async def close(self) -> None:
        """See `Environment.close`."""
        self._past.ended = True

    async def _play(self, log: Sequence[Message]) -> None:
        """Come to the state after `log`, as a new branch whose key table is empty (P26)."""
        past = self._past
        if past.task is None:
            raise EnvironmentFault(f"{self.name}: nothing to restore before reset", transient=False)
        await self.reset(past.task, past.seed)
        for index, message in enumerate(log):
            await self.step(message, f"again/{index}")
        past.results.clear()
