"""From the end of an attempt to the ledger::

    played ─► encoded ─► episode store (P9) ─► outbox (P11) ─► put ─► answered
    cancelled ─────────────────────────────────┘

Each step is durable before the next begins, so that a death between two of them loses nothing that the ledger counts
on, and repeats nothing that it does not recognise. What ends meanwhile piles up and goes in one batch: one file, one
line in the outbox for each, one call, so that neither a slow disk nor a slow server makes the files many.

A full disk is waited for a little: the learner, which writes more, meets it as well, and removes what nobody needs
(P23).
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from headrace.actors.attempts import Cancelled
from headrace.actors.outbox import Entry, Outbox
from headrace.actors.plan import PlayedEpisode
from headrace.actors.text import well_formed_text
from headrace.platform.contracts import Ledger
from headrace.platform.errors import DiskFull
from headrace.platform.hashing import digest
from headrace.platform.records.codec import episode_codec
from headrace.platform.records.delivery import Outcome, PutReply, Submission
from headrace.platform.records.ids import AttemptId
from headrace.platform.records.status import FaultOwner, Purpose, Status, StopReason
from headrace.platform.store.episodes import EpisodeStore
from headrace.platform.store.tables import RewardTable
from headrace.platform.testing.failpoints import failpoint

_log = logging.getLogger(__name__)
MAX_DELIVERY = 512
"""Attempts in one batch."""
_ROOM_PAUSES_S = (0.5, 1.0, 2.0, 4.0)
"""Between tries of a write that found the disk full."""


@dataclass(kw_only=True, slots=True)
class Delivery:
    """Writes episodes and rewards, and puts those that were played for training.

    `outbox` is None where the ledger dies with this process, so that nothing can be put again.
    """

    ledger: Ledger
    store: EpisodeStore
    rewards: RewardTable
    worker_id: str
    outbox: Outbox | None = None

    async def deliver(
        self, played: Sequence[PlayedEpisode], cancelled: Sequence[Cancelled] = ()
    ) -> list[tuple[AttemptId, PutReply]]:
        """Store all that was played, put what is training's; the ledger's reply to each of those.

        Raises:
            DiskFull: nobody has made room in time.
        """
        encoded = [_encoded(each) for each in played]
        submissions, entries = await self._kept(encoded, cancelled)
        if not submissions:
            return []
        replies = await self.ledger.put(submissions)
        failpoint("after_put")
        answered_s = time.monotonic()
        for entry in entries:
            entry.answered_s = answered_s
        return [(put.attempt_id, reply) for put, reply in zip(submissions, replies, strict=True)]

    async def _kept(
        self, encoded: Sequence[tuple[PlayedEpisode, bytes]], cancelled: Sequence[Cancelled]
    ) -> tuple[list[Submission], list[Entry]]:
        for pause_s in _ROOM_PAUSES_S:
            try:
                return await asyncio.to_thread(self._keep, encoded, cancelled)
            except DiskFull as error:
                _log.warning("%d attempts wait for room: %s", len(encoded) + len(cancelled), error)
                await asyncio.sleep(pause_s)
        return await asyncio.to_thread(self._keep, encoded, cancelled)

    def _keep(
        self, encoded: Sequence[tuple[PlayedEpisode, bytes]], cancelled: Sequence[Cancelled]
    ) -> tuple[list[Submission], list[Entry]]:
        """Make everything durable that the put will speak of."""
        file = self._write([each for each, _ in encoded], [payload for _, payload in encoded]) if encoded else ""
        failpoint("after_store")
        submissions = [
            _submission(each, payload, file) for each, payload in encoded if each.episode.purpose is Purpose.TRAIN
        ]
        submissions += [
            Submission(attempt_id=each.attempt_id, outcome=Outcome.CANCELLED, reason=each.reason) for each in cancelled
        ]
        entries = self.outbox.add(submissions) if self.outbox is not None and submissions else []
        failpoint("after_outbox")
        return submissions, entries

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
    oldest, newest = episode.oldest_version, episode.newest_version
    if played.score is None or oldest is None or newest is None:
        owner = episode.fault_owner if episode.fault_owner is not FaultOwner.NONE else FaultOwner.ENVIRONMENT
        return Submission(
            attempt_id=episode.attempt_id,
            outcome=Outcome.FAILED,
            owner=owner,
            # Only a fault that passes. A grader that failed on a sound episode would most likely fail on the next.
            retryable=episode.status.is_retryable,
            action_tokens=episode.action_tokens,
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
        newest_version=newest,
        environment=f"{episode.environment}@{episode.environment_version}",  # P17
        action_tokens=episode.action_tokens,
    )
