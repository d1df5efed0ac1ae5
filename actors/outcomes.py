"""What a worker tells the driver: small records of how episodes went."""

import msgspec

from headrace.actors.plan import PlayedEpisode
from headrace.platform.records.status import FaultOwner, Status


class EpisodeOutcome(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One evaluated episode. `score` is None when it says nothing about the policy; `fault` says what broke."""

    episode_id: str
    task_id: str
    score: float | None
    status: Status
    fault_owner: FaultOwner
    turns: int
    sampled_tokens: int
    duration_s: float
    tool_s: float
    fault: str = ""


class WorkerStats(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A worker's counts since its start: episodes by status, running ones, the last faults."""

    worker_id: str
    running: int
    statuses: dict[str, int]
    faults: tuple[str, ...]


def outcome_of(played: PlayedEpisode) -> EpisodeOutcome:
    """The outcome of a played episode."""
    episode = played.episode
    return EpisodeOutcome(
        episode_id=episode.episode_id,
        task_id=episode.task.task_id,
        score=played.score,
        status=episode.status,
        fault_owner=episode.fault_owner,
        turns=len(episode.views),
        sampled_tokens=episode.cost.sampled_tokens,
        duration_s=episode.duration_s,
        tool_s=episode.cost.tool_s,
        fault=episode.fault,
    )
