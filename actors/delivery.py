"""From a played episode to its submission: stored durably first, then put (P9).

Finished episodes are written in whatever batches pile up while the one before is written: one file and one ledger
call each, so that neither a slow disk nor a slow server makes the files many.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.actors.plan import PlayedEpisode
from headrace.platform.contracts import Ledger
from headrace.platform.hashing import digest
from headrace.platform.records.codec import episode_codec
from headrace.platform.records.delivery import Outcome, PutReply, Submission
from headrace.platform.records.ids import AttemptId
from headrace.platform.records.status import FaultOwner, Purpose
from headrace.platform.store.episodes import EpisodeStore
from headrace.platform.store.tables import RewardTable


@dataclass(kw_only=True, slots=True)
class Delivery:
    """Writes episodes and rewards, and puts those that were played for training."""

    ledger: Ledger
    store: EpisodeStore
    rewards: RewardTable
    worker_id: str

    async def deliver(self, played: Sequence[PlayedEpisode]) -> list[tuple[AttemptId, PutReply]]:
        """Store all, put the training ones; the ledger's reply to each of those."""
        payloads = [episode_codec.encode(each.episode) for each in played]
        file = await asyncio.to_thread(self._write, played, payloads)
        submissions = [
            _submission(each, payload, file)
            for each, payload in zip(played, payloads, strict=True)
            if each.episode.purpose is Purpose.TRAIN
        ]
        replies = await self.ledger.put(submissions) if submissions else ()
        return [(put.attempt_id, reply) for put, reply in zip(submissions, replies, strict=True)]

    def _write(self, played: Sequence[PlayedEpisode], payloads: Sequence[bytes]) -> str:
        file = self.store.write(
            [(each.episode, payload) for each, payload in zip(played, payloads, strict=True)], self.worker_id
        )
        rows = [row for each in played for row in each.rewards]
        if rows:
            self.rewards.append(rows)
        return file


def _submission(played: PlayedEpisode, payload: bytes, file: str) -> Submission:
    episode = played.episode
    oldest = episode.oldest_version
    if played.score is None or oldest is None:
        owner = episode.fault_owner if episode.fault_owner is not FaultOwner.NONE else FaultOwner.ENVIRONMENT
        return Submission(
            attempt_id=episode.attempt_id,
            outcome=Outcome.FAILED,
            owner=owner,
            retryable=episode.status.is_retryable or played.score is None,
            reason=episode.fault or "no valid reward",
        )
    return Submission(
        attempt_id=episode.attempt_id,
        outcome=Outcome.DONE,
        payload=payload,
        payload_hash=digest(payload),
        store_file=file,
        score=played.score,
        oldest_version=oldest,
        action_tokens=episode.action_tokens,
    )
