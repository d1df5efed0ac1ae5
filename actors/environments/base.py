"""What most environments need: keyed idempotent steps, an end that is an end, snapshots by re-execution.

An environment derives from `ReplayedEnvironment` and writes `_reset` and `_step`. The base keeps the log of what was
done, so that `snapshot`, `restore` and `clone` work by deterministic re-execution (docs/design.md section 5), and
answers a repeated key from its table (P25). The price is one re-execution per restore; a world that can copy its state
cheaply overrides them.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from headrace.platform.errors import EnvironmentFault
from headrace.platform.records.message import Message, Observation, StepResult, Task, ToolSpec


class ReplayedEnvironment(ABC):
    """A session whose past can be played again."""

    name: str
    version: str

    def __init__(self) -> None:
        self._task: Task | None = None
        self._seed = 0
        self._log: list[Message] = []
        self._results: dict[str, tuple[Message, StepResult]] = {}
        self._snapshots: dict[str, tuple[Message, ...]] = {}
        self._ended = False

    @abstractmethod
    def tools(self) -> Sequence[ToolSpec]:
        """The tools on offer."""

    @abstractmethod
    async def _reset(self, task: Task, seed: int) -> Observation:
        """Begin the world anew; called any number of times."""

    @abstractmethod
    async def _step(self, message: Message) -> StepResult:
        """Act on the world; called once per key."""

    @abstractmethod
    def _fresh(self) -> "ReplayedEnvironment":
        """A new session with the same settings, not yet reset."""

    async def reset(self, task: Task, seed: int) -> Observation:
        """See `Environment.reset`."""
        self._task, self._seed = task, seed
        self._log.clear()
        self._results.clear()
        self._ended = False
        return await self._reset(task, seed)

    async def step(self, message: Message, key: str) -> StepResult:
        """See `Environment.step`.

        Raises:
            EnvironmentFault: before `reset`, after the end, or for a known key with another message (P25).
        """
        if key in self._results:
            known, result = self._results[key]
            if known != message:
                raise EnvironmentFault(f"key {key!r} was used for another message", transient=False)
            return result
        if self._task is None or self._ended:
            what = "before reset" if self._task is None else "after the end"
            raise EnvironmentFault(f"{self.name}: step {what} of the episode", transient=False)
        result = await self._step(message)
        self._log.append(message)
        self._results[key] = (message, result)
        self._ended = result.terminated or result.truncated
        return result

    async def snapshot(self) -> str:
        """See `Environment.snapshot`. The id names a point of this session's log."""
        snapshot_id = f"{self.name}-step-{len(self._log)}-{len(self._snapshots)}"
        self._snapshots[snapshot_id] = tuple(self._log)
        return snapshot_id

    async def restore(self, snapshot_id: str) -> None:
        """See `Environment.restore`.

        Raises:
            EnvironmentFault: for a snapshot that this session did not make.
        """
        if snapshot_id not in self._snapshots:
            raise EnvironmentFault(f"{self.name} has no snapshot {snapshot_id!r}", transient=False)
        await self._play(self._snapshots[snapshot_id])

    async def clone(self) -> "ReplayedEnvironment":
        """See `Environment.clone`."""
        twin = self._fresh()
        twin._task, twin._seed = self._task, self._seed
        if self._task is not None:
            await twin._play(tuple(self._log))
        return twin

    async def close(self) -> None:
        """See `Environment.close`."""
        self._ended = True

    async def _play(self, log: Sequence[Message]) -> None:
        """Come to the state after `log`, as a new branch whose key table is empty (P26)."""
        if self._task is None:
            raise EnvironmentFault(f"{self.name}: nothing to restore before reset", transient=False)
        await self.reset(self._task, self._seed)
        for index, message in enumerate(log):
            await self.step(message, f"again/{index}")
        self._results.clear()
