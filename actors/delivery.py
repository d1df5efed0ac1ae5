"""From a played episode to its submission: stored durably first, then put (P9).

Finished episodes are written in whatever batches pile up while the one before is written: one file and one ledger
call each, so that neither a slow disk nor a slow server makes the files many.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from headrace.actors.plan import PlayedEpisode
from headrace.actors.text import well_formed_text
from headrace.platform.contracts import Ledger
from headrace.platform.hashing import digest
from headrace.platform.records.codec import episode_codec
from headrace.platform.records.delivery import Outcome, PutReply, Submission
from headrace.platform.records.ids import AttemptId
from headrace.platform.records.status import FaultOwner, Purpose, Status, StopReason
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
        encoded = [_encoded(each) for each in played]
        storable = [each for each, _ in encoded]
        payloads = [payload for _, payload in encoded]
        file = await asyncio.to_thread(self._write, storable, payloads)
        submissions = [
            _submission(each, payload, file) for each, payload in encoded if each.episode.purpose is Purpose.TRAIN
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


def _encoded(played: PlayedEpisode) -> tuple[PlayedEpisode, bytes]:
    """The episode and its payload. One that no store takes (a value without a wire form, a text that is no text) is
    reduced to the fault that it is, so that its siblings go on."""
    try:
        return played, episode_codec.encode(played.episode)
    except (TypeError, ValueError, OverflowError, NotImplementedError, RecursionError) as error:
        bare = msgspec.structs.replace(
            played.episode,
            turns=(),
            views=(),
            status=Status.ENV_BUG,
            stop_reason=StopReason.FAULT,
            terminated=False,
            truncated=False,
            fault_owner=FaultOwner.ENVIRONMENT,
            fault=well_formed_text(f"the episode cannot be stored: {type(error).__name__}: {error}"),
        )
        return PlayedEpisode(episode=bare, rewards=(), score=None), episode_codec.encode(bare)


def _submission(played: PlayedEpisode, payload: bytes, file: str) -> Submission:
    episode = played.episode
    oldest = episode.oldest_version
    if played.score is None or oldest is None:
        owner = episode.fault_owner if episode.fault_owner is not FaultOwner.NONE else FaultOwner.ENVIRONMENT
        return Submission(
            attempt_id=episode.attempt_id,
            outcome=Outcome.FAILED,
            owner=owner,
            # Only a fault that passes. A grader that failed on a sound episode would most likely fail on the next.
            retryable=episode.status.is_retryable,
            reason=played.cause or "the policy sampled no token",
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
