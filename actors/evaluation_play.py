"""Evaluation episodes of one worker: played on request, stored, and never in the ledger's books (P3)."""

import asyncio
import time
from collections.abc import Callable, Sequence

from headrace.actors.delivery import MAX_DELIVERY, Delivery
from headrace.actors.outcomes import outcome_of
from headrace.actors.plan import PlayedEpisode
from headrace.actors.player import Place, Player
from headrace.actors.worker_settings import WorkerSettings
from headrace.actors.worlds import Worlds
from headrace.platform.records.evaluation import EpisodeOutcome
from headrace.platform.records.ids import AttemptId
from headrace.platform.records.status import Purpose


class EvaluationPlay:
    """Plays evaluations.

    Args:
        worlds_of: makes the worlds of a split; asked once for each.
    """

    def __init__(
        self, settings: WorkerSettings, player: Player, delivery: Delivery, worlds_of: Callable[[str], Worlds]
    ) -> None:
        self._settings = settings
        self._player = player
        self._delivery = delivery
        self._worlds_of = worlds_of
        self._worlds: dict[str, Worlds] = {}

    async def evaluate(
        self, version: int, split: str, positions: Sequence[int], index: int, samples: int
    ) -> list[EpisodeOutcome]:
        """See `RolloutWorker.evaluate`."""
        if split not in self._worlds:
            self._worlds[split] = await asyncio.to_thread(self._worlds_of, split)
        worlds = self._worlds[split]
        free = asyncio.Semaphore(self._settings.max_episodes)

        async def one(place: Place, sample: int) -> PlayedEpisode:
            async with free:
                number = index * samples + sample
                attempt_id = AttemptId(self._settings.run, place.position, number, 0, Purpose.EVAL)
                return await self._player.play(attempt_id, place, version, time.time(), sample)

        places = [Place(worlds, position) for position in worlds.distinct(positions)]
        played = await asyncio.gather(*(one(place, sample) for place in places for sample in range(samples)))
        for start in range(0, len(played), MAX_DELIVERY):
            await self._delivery.deliver(played[start : start + MAX_DELIVERY])
        return [outcome_of(each, number % samples) for number, each in enumerate(played)]
