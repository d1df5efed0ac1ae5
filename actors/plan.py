"""What goes into an episode and what comes out of it."""

from dataclasses import dataclass, field
from typing import Protocol

from headrace.platform.records.episode import Budgets, Digests, Episode
from headrace.platform.records.generation import SamplingParams
from headrace.platform.records.ids import AttemptId
from headrace.platform.records.message import RewardComponent, Task
from headrace.platform.records.status import FaultOwner, Status, StopReason, UpdateMode
from headrace.platform.records.tables import RewardRow
from headrace.platform.records.versions import VersionRef


@dataclass(kw_only=True, slots=True)
class EpisodePlan:
    """Everything that decides how an episode goes, apart from the weights and the world.

    `version` is what the first turn asks for. Under STICKY all turns have it; under the other modes it is the oldest
    that any may have.

    `sample` numbers the episode among those of its task where the attempt's own number may not decide what is sampled:
    in evaluations, which must come out the same under whatever ids they are stored.

    Where `prefix` is set, the episode branches off it: it begins with the turns of that episode up to its step
    `branch_step` (0 is the reset), as they were.
    """

    attempt_id: AttemptId
    task: Task
    seed: int
    sample: int | None = None
    version: VersionRef
    sampling: SamplingParams = field(default_factory=SamplingParams)
    budgets: Budgets = field(default_factory=Budgets)
    digests: Digests = field(default_factory=Digests)
    update_mode: UpdateMode = UpdateMode.STICKY
    reset_deadline_s: float = 30.0
    step_deadline_s: float = 30.0
    request_deadline_s: float = 60.0
    dispatched_s: float = 0.0
    worker_id: str = ""
    prefix: Episode | None = None
    branch_step: int | None = None


@dataclass(slots=True)
class Ending:
    """Why an episode ended, and whose fault it was if it was anyone's."""

    stop_reason: StopReason
    status: Status = Status.OK
    owner: FaultOwner = FaultOwner.NONE
    fault: str = ""


@dataclass(kw_only=True, slots=True)
class PlayedEpisode:
    """An episode and its rewards. `score` is None when the episode says nothing about the policy."""

    episode: Episode
    rewards: tuple[RewardRow, ...]
    score: float | None

    @property
    def cause(self) -> str:
        """Why there is no score: the episode's fault, else what a grader failed with; empty where there is one."""
        if self.score is not None:
            return ""
        if self.episode.fault:
            return self.episode.fault
        if not any(row.kind.is_reward for row in self.rewards):
            return f"{self.episode.environment} gave no reward, and no scorer grades it"
        return next((row.evidence for row in self.rewards if not row.valid), "") or "no valid reward"


class AsyncScorer(Protocol):
    """A `Scorer` in its own process, under a deadline."""

    version: str

    async def score(self, task: Task, episode: Episode) -> tuple[RewardComponent, ...]:
        """Components; invalid ones where the scorer failed."""

    async def close(self) -> None:
        """End the process."""
