"""A scorer that has made up its mind."""

from collections.abc import Sequence

from headrace.platform.records.episode import Episode
from headrace.platform.records.message import RewardComponent, Task
from headrace.platform.records.status import RewardKind


class FixedScorer:
    """Gives one value to every episode, others to those that are named, or raises.

    Args:
        value: the outcome of an episode that is not in `by_episode`.
        by_episode: outcomes by episode id.
        error: raised instead, by every call.
    """

    version = "fixed/1"

    def __init__(
        self, value: float = 1.0, by_episode: dict[str, float] | None = None, error: Exception | None = None
    ) -> None:
        self._value = value
        self._by_episode = by_episode or {}
        self._error = error

    def score(self, task: Task, episode: Episode) -> Sequence[RewardComponent]:
        """See `Scorer.score`."""
        if self._error is not None:
            raise self._error
        value = self._by_episode.get(episode.episode_id, self._value)
        return (RewardComponent(RewardKind.OUTCOME, value, evidence="fixed"),)

    def score_group(self, task: Task, episodes: Sequence[Episode]) -> Sequence[Sequence[RewardComponent]]:
        """See `Scorer.score_group`."""
        return [self.score(task, episode) for episode in episodes]
