"""Tasks, environments and scorers: the world that an episode is played in, and who grades it."""

from collections.abc import Awaitable, Sequence
from typing import Protocol, TypeAlias, TypeVar, Union, runtime_checkable

from headrace.platform.records.episode import Episode
from headrace.platform.records.message import (
    Message,
    Observation,
    RewardComponent,
    StepResult,
    Task,
    ToolSpec,
)

T = TypeVar("T")
MaybeAwaitable: TypeAlias = Union[T, Awaitable[T]]  # noqa: UP007 - a union with a type variable cannot be written with | here


class TaskSource(Protocol):
    """A deterministic sequence of tasks; its state is a position in it.

    A group's ticket names the position of its task, which is the group's own number unless it restarts another group:
    so any worker can take any group, and the position in a checkpoint is the dispatch sequence. Sources of finite data
    start over with a new order each epoch.
    """

    @property
    def split(self) -> str:
        """One of "train", "dev" and "hidden"; splits share no task and no seed."""

    @property
    def state(self) -> int:
        """The position: how many tasks have been given out."""

    def restore(self, state: int) -> None:
        """Go to a position that `state` returned, forwards or backwards."""

    def next(self, n: int) -> Sequence[Task]:
        """The next `n` tasks. Raises ConfigError when there are none at all."""


@runtime_checkable
class Environment(Protocol):
    """One session of a world. Methods may be plain or async; plain ones run off the event loop, one at a time.

    Order: `reset`, then `step` until a result is terminated or truncated, then nothing but `snapshot` and `close`: a
    step after the end raises. A failure of the environment is raised as EnvironmentFault or anything else, never
    returned as a reward; a mistake of the model is returned, as an observation with status MODEL_INVALID_ACTION.
    """

    name: str
    version: str

    def tools(self) -> Sequence[ToolSpec]:
        """The tools on offer; the same for the whole session."""

    def reset(self, task: Task, seed: int) -> MaybeAwaitable[Observation]:
        """Begin. The same task and seed give the same observation and state hash."""

    def step(self, message: Message, key: str) -> MaybeAwaitable[StepResult]:
        """Act. The same key again returns the recorded result; the same key with another message raises (P25)."""

    def snapshot(self) -> MaybeAwaitable[str]:
        """Keep the present state and return its id."""

    def restore(self, snapshot_id: str) -> MaybeAwaitable[None]:
        """Go back to a snapshot, as a new branch with an empty key table (P26)."""

    def clone(self) -> MaybeAwaitable["Environment"]:
        """An independent session in the present state."""

    def close(self) -> MaybeAwaitable[None]:
        """Release everything; safe to call twice."""


class Scorer(Protocol):
    """Turns a finished episode into reward components. Runs in a process of its own, under a deadline.

    A raise or a time-out becomes a component with `valid=False`; only what it returns is a reward (case E1).
    """

    version: str

    def score(self, task: Task, episode: Episode) -> Sequence[RewardComponent]:
        """Components for one episode."""

    def score_group(self, task: Task, episodes: Sequence[Episode]) -> Sequence[Sequence[RewardComponent]]:
        """Components for each episode of a group, in order; for scorers that compare."""
