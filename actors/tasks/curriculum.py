"""The success-window curriculum: prefer tasks that the policy sometimes solves.

It knows, by task or by level, the scores of the most recent episodes, counted by the number of their group. What it
knows depends on which results it was told, not on the order: workers that were told the same choose the same, and a
resumed run that reads its stored episodes knows what the interrupted one knew.
"""

import heapq
from collections.abc import Iterable

import msgspec

from headrace.platform.config.tasks import CurriculumConfig
from headrace.platform.errors import ConfigError
from headrace.platform.records.message import Task

CANDIDATES = 8
"""Tasks that are looked at for one group, at most."""
MOST_KEYS = 100_000
"""Tasks or levels that are surely remembered; well beyond it those played least recently are forgotten."""


class TaskResult(msgspec.Struct, frozen=True, order=True, gc=False):
    """The score of one training episode, by environment and key (see `Curriculum.key`)."""

    environment: str
    key: str
    score: float
    group: int


class Curriculum:
    """Success by task or level, and what follows from it."""

    def __init__(self, config: CurriculumConfig) -> None:
        self._config = config
        self._recent: dict[tuple[str, str], list[tuple[int, float]]] = {}  # (group, score), the oldest first

    def key(self, task: Task) -> str:
        """What success is counted by: the value of `curriculum.level` in the task's data, else the task's id."""
        level = self._config.level
        return str(task.data[level]) if level and level in task.data else task.task_id

    def observe(self, results: Iterable[TaskResult]) -> None:
        """Take note of episodes. A score counts from 0 to 1: graded above that a task is solved, below it is not."""
        for result in results:
            recent = self._recent.setdefault((result.environment, result.key), [])
            heapq.heappush(recent, (result.group, min(1.0, max(0.0, result.score))))
            if len(recent) > self._config.memory:
                heapq.heappop(recent)
        if len(self._recent) > 1.25 * MOST_KEYS:
            kept = heapq.nlargest(MOST_KEYS, self._recent.items(), key=lambda item: max(item[1]))
            self._recent = dict(kept)

    def rate(self, environment: str, key: str) -> float | None:
        """The mean score of what is remembered; None where nothing is."""
        recent = self._recent.get((environment, key))
        if not recent:
            return None
        return sum(score for _, score in sorted(recent)) / len(recent)

    def admits(self, environment: str, key: str, draw: float) -> bool:
        """Whether to play such a task. `draw`, from [0, 1), lets some through that lie outside of the window."""
        rate = self.rate(environment, key)
        return rate is None or self._config.low <= rate <= self._config.high or draw < self._config.floor


def check_level(level: str, tasks: Iterable[Task]) -> None:
    """Refuse a `curriculum.level` that no environment's first task has. Raises ConfigError that lists what there is."""
    keys: set[str] = set()
    for task in tasks:
        keys |= task.data.keys()
    if level not in keys:
        raise ConfigError(f"curriculum.level={level!r} is no key of any environment's tasks; there are {sorted(keys)}")
