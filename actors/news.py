"""What one worker has found out and all others should know. The driver carries it from one to the others."""

import msgspec

from headrace.actors.quarantine import QuarantinedTask
from headrace.actors.tasks.curriculum import TaskResult


class News(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Scores of training episodes, for the curriculum, and tasks that are out."""

    scores: tuple[TaskResult, ...] = ()
    quarantined: tuple[QuarantinedTask, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.scores or self.quarantined)

    def __add__(self, other: "News") -> "News":
        return News(scores=self.scores + other.scores, quarantined=self.quarantined + other.quarantined)
