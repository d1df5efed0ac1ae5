"""Grading as whoever plays an episode sees it: foreign code behind a boundary, of which no failure is a reward."""

from headrace.actors.plan import AsyncScorer
from headrace.platform.records.episode import Episode
from headrace.platform.records.message import RewardComponent, Task
from headrace.platform.records.status import RewardKind


async def graded(scorer: AsyncScorer, task: Task, episode: Episode) -> tuple[RewardComponent, ...]:
    """What the scorer says; a scorer that raises has said nothing (case E1)."""
    try:
        return await scorer.score(task, episode)
    except Exception as error:  # the boundary
        return (RewardComponent(RewardKind.OUTCOME, valid=False, evidence=f"{type(error).__name__}: {error}"),)
