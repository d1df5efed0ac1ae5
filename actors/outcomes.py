"""What a worker tells the driver: small records of how episodes went."""

from collections.abc import Iterable, Mapping

import msgspec

from headrace.actors.plan import PlayedEpisode
from headrace.actors.quarantine import QuarantinedTask
from headrace.platform.errors import SandboxDied
from headrace.platform.records.evaluation import EpisodeOutcome
from headrace.platform.records.permissions import UNSAID, Safety
from headrace.platform.records.status import FaultOwner


class EnvironmentCounts(msgspec.Struct, kw_only=True):
    """How the training episodes of one environment went, since the start.

    `scored` episodes have a score, which `score_sum` adds up; `faults` counts the others by owner, and `sandbox_died`
    those of them whose box was gone: a policy that learns to end its box escapes its reward. `segments_opened` counts
    contexts that could not be extended exactly and were begun anew (case T3). `struck` episodes met a fault that was
    put in on purpose; `recovered` of them have a score nevertheless, which `recovery_sum` adds up. `safety` is what
    the gateway counted.
    """

    episodes: int = 0
    scored: int = 0
    score_sum: float = 0.0
    faults: dict[str, int] = {}
    sandbox_died: int = 0
    turns: int = 0
    sampled_tokens: int = 0
    segments_opened: int = 0
    duration_s: float = 0.0
    struck: int = 0
    recovered: int = 0
    recovery_sum: float = 0.0
    safety: Safety = UNSAID

    @property
    def recovery(self) -> float | None:
        """Mean score of the episodes that went on to a score after an injected fault; None where there is none."""
        return self.recovery_sum / self.recovered if self.recovered else None

    def add(self, played: PlayedEpisode) -> None:
        """Count an episode."""
        episode = played.episode
        self.episodes += 1
        if played.score is not None:
            self.scored += 1
            self.score_sum += played.score
        if episode.fault_owner is not FaultOwner.NONE:
            owner = episode.fault_owner.value
            self.faults[owner] = self.faults.get(owner, 0) + 1
            self.sandbox_died += episode.fault.startswith(SandboxDied.__name__)
        inherited = episode.inherited_turns
        self.turns += sum(view.turn >= inherited for view in episode.views)
        self.sampled_tokens += episode.cost.sampled_tokens - sum(
            turn.cost.sampled_tokens for turn in episode.turns[:inherited]
        )
        newest = {turn.agent_id: turn.segment for turn in episode.turns}
        self.segments_opened += sum(newest.values())
        self.duration_s += episode.duration_s
        if episode.safety != UNSAID:
            self.safety += episode.safety
        if episode.injected_faults:
            self.struck += 1
            if played.score is not None:
                self.recovered += 1
                self.recovery_sum += played.score

    def __add__(self, other: "EnvironmentCounts") -> "EnvironmentCounts":
        faults = dict(self.faults)
        for owner, count in other.faults.items():
            faults[owner] = faults.get(owner, 0) + count
        return EnvironmentCounts(
            episodes=self.episodes + other.episodes,
            scored=self.scored + other.scored,
            score_sum=self.score_sum + other.score_sum,
            faults=faults,
            sandbox_died=self.sandbox_died + other.sandbox_died,
            turns=self.turns + other.turns,
            sampled_tokens=self.sampled_tokens + other.sampled_tokens,
            segments_opened=self.segments_opened + other.segments_opened,
            duration_s=self.duration_s + other.duration_s,
            struck=self.struck + other.struck,
            recovered=self.recovered + other.recovered,
            recovery_sum=self.recovery_sum + other.recovery_sum,
            safety=self.safety + other.safety,
        )


class WorkerStats(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A worker's counts since its start: training episodes by status and by environment, running ones, the last
    faults. `durability` says what the server promises about puts (P11): "confirmed", or "best-effort" where it cannot
    say that they are on its disk; empty while that is not known, and where nothing is kept to be put again.
    `quarantined` are the tasks that this worker has put into quarantine since its start. `retried` generations were
    asked for again under their key, `resampled` ones sampled again as their replica was gone (P24)."""

    worker_id: str
    running: int
    statuses: dict[str, int]
    faults: tuple[str, ...]
    environments: dict[str, EnvironmentCounts] = {}
    durability: str = ""
    quarantined: tuple[QuarantinedTask, ...] = ()
    retried: int = 0
    resampled: int = 0

    @property
    def segments_opened(self) -> int:
        """Over all environments (case T3)."""
        return sum(counts.segments_opened for counts in self.environments.values())


def total_counts(parts: Iterable[Mapping[str, EnvironmentCounts]]) -> dict[str, EnvironmentCounts]:
    """The counts of several workers together, as copies."""
    total: dict[str, EnvironmentCounts] = {}
    for part in parts:
        for name, counts in part.items():
            total[name] = total.get(name, EnvironmentCounts()) + counts
    return total


def outcome_of(played: PlayedEpisode, sample: int) -> EpisodeOutcome:
    """The outcome of an evaluated episode, the `sample`-th of its task."""
    episode = played.episode
    return EpisodeOutcome(
        episode_id=episode.episode_id,
        environment=episode.task.environment,
        task_id=episode.task.task_id,
        seed=episode.seed,
        sample=sample,
        score=played.score,
        status=episode.status,
        fault_owner=episode.fault_owner,
        turns=len(episode.views),
        sampled_tokens=episode.cost.sampled_tokens,
        duration_s=episode.duration_s,
        tool_s=episode.cost.tool_s,
        fault=played.cause,
        injected_faults=len(episode.injected_faults),
        safety=episode.safety,
    )
