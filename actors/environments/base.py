"""What most environments need: keyed idempotent steps, an end that is an end, snapshots by re-execution.

An environment derives from `ReplayedEnvironment` and writes `tools`, `_reset` and `_step`, plain or async. The base
keeps the log of what was done, so that `snapshot`, `restore` and `clone` work by deterministic re-execution
(docs/design.md section 5), and answers a repeated key from its table (P25). The price is one re-execution per restore;
a world that can copy its state cheaply overrides them. What the world asks of services outside of it goes through
`outside`, onto a cassette that a re-execution answers from.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar, cast

from headrace.actors.environments.answers import checked_observation, checked_step
from headrace.actors.environments.cassette import Cassette, External, copied, plain
from headrace.actors.environments.off_loop import OffLoop
from headrace.platform.contracts import MaybeAwaitable
from headrace.platform.errors import EnvironmentFault
from headrace.platform.records.episode import Provenance
from headrace.platform.records.message import Message, Observation, StepResult, Task, ToolSpec

T = TypeVar("T")
_IN_THE_WORKER = Provenance()


@dataclass(slots=True)
class _Past:
    """What the base remembers of a session; one attribute, so that a subclass can name its own as it likes."""

    made_with: tuple[tuple[Any, ...], dict[str, Any]]
    task: Task | None = None
    seed: int = 0
    log: list[Message] = field(default_factory=list)
    results: dict[str, tuple[Message, StepResult]] = field(default_factory=dict)
    snapshots: dict[str, tuple[tuple[Message, ...], External]] = field(default_factory=dict)
    cassette: Cassette = field(default_factory=Cassette)
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

    @property
    def provenance(self) -> Provenance:
        """What the episode's record keeps of this session beside name and version."""
        recorded = self._past.cassette.recorded
        return Provenance(external=copied(recorded)) if recorded else _IN_THE_WORKER

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

    async def outside(self, request: Any, call: Callable[[], MaybeAwaitable[T]]) -> T:
        """The answer of a service outside of the world, for `_reset` and `_step` to go on with.

        `call` is run once, off the loop where it is plain, and its answer put on the session's cassette; a
        re-execution gets the same answer from there and calls nobody. `request` is JSON-safe and says what is asked,
        so that a world that asks for something else is noticed. The answer is JSON-safe and returned as it is after a
        hop: a tuple is a list. An error of `call` is raised and not recorded: where it is part of the world, turn it
        into an answer within `call`.

        Raises:
            EnvironmentFault: request or answer is not JSON-safe.
            ExternalDivergence: the cassette does not know the request at this step, and nobody may be asked.
        """
        cassette = self._past.cassette
        asked = plain(request, f"what {self.name} asks for outside")
        is_known, answer = cassette.find(asked)
        if not is_known:
            answer = plain(await self._off_loop.call(call), f"what {self.name} was answered from outside")
            cassette.keep(asked, answer)
            answer = plain(answer, "an answer")
        return cast(T, answer)

    def load_cassette(self, external: External, live: bool = False) -> Cassette:
        """From the next reset on, answer `outside` from `external`, as `Episode.external` holds it.

        Args:
            external: what was recorded.
            live: whether what it does not know may be asked for; else that is an ExternalDivergence.

        Returns:
            The session's cassette, which counts what it answered and what it did not know.
        """
        self._past.cassette = Cassette(external, live)
        return self._past.cassette

    async def reset(self, task: Task, seed: int) -> Observation:
        """See `Environment.reset`."""
        past = self._past
        past.task, past.seed = task, seed
        past.log.clear()
        past.results.clear()
        past.ended = False
        past.cassette.begin(0)
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
        past.cassette.begin(len(past.log) + 1)
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
        past.snapshots[snapshot_id] = (tuple(past.log), copied(past.cassette.recorded))
        return snapshot_id

    async def restore(self, snapshot_id: str) -> None:
        """See `Environment.restore`.

        Raises:
            EnvironmentFault: for a snapshot that this session did not make.
        """
        if snapshot_id not in self._past.snapshots:
            raise EnvironmentFault(f"{self.name} has no snapshot {snapshot_id!r}", transient=False)
        await self._play(*self._past.snapshots[snapshot_id])

    async def clone(self) -> "ReplayedEnvironment":
        """See `Environment.clone`."""
        twin, past = await self._off_loop.call(self._fresh), self._past
        twin._past.task, twin._past.seed = past.task, past.seed
        twin._off_loop = OffLoop(self._off_loop.executor)
        if past.task is not None:
            twin._past.cassette = copy(past.cassette)
            await twin._play(tuple(past.log), copied(past.cassette.recorded))
        return twin

    async def close(self) -> None:
        """See `Environment.close`."""
        self._past.ended = True

    async def _play(self, log: Sequence[Message], external: External) -> None:
        """Come to the state after `log`, as a new branch whose key table is empty (P26). What was asked outside on the
        way, `external`, is not asked again; what comes later is the session's own cassette's."""
        past = self._past
        if past.task is None:
            raise EnvironmentFault(f"{self.name}: nothing to restore before reset", transient=False)
        own, past.cassette = past.cassette, Cassette(external)
        try:
            await self.reset(past.task, past.seed)
            for index, message in enumerate(log):
                await self.step(message, f"again/{index}")
            own.recorded = past.cassette.recorded
        finally:
            past.cassette = own
        past.results.clear()
