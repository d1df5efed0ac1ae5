"""Plays attempts: makes what is played at a place, plays one episode there, remembers when its tools ran.

Owns what all who play share: renderer, generator, scorers. The ledger, and what becomes of an episode, are the
worker's.
"""

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import msgspec

from headrace.actors.episode import play_episode
from headrace.actors.harness.play import Doorway, play_harness
from headrace.actors.plan import AsyncScorer, EpisodePlan, PlayedEpisode
from headrace.actors.replaying.branch import Prefix
from headrace.actors.sampling import sampling_params
from headrace.actors.worker_settings import WorkerSettings
from headrace.actors.worlds import Setting, Worlds
from headrace.platform.contracts import Renderer, TokenGenerator
from headrace.platform.records.ids import AttemptId
from headrace.platform.records.status import Purpose, UpdateMode
from headrace.platform.records.versions import VersionRef

_INTERVALS = 65536


@dataclass(slots=True)
class Place:
    """What is played at one position, made when it is first asked for: everyone who plays there plays the same."""

    worlds: Worlds
    position: int
    setting: Setting | None = None


class Player:
    """Plays episodes, any number at once.

    Args:
        scorers: by environment, as recipes know it, for those that have one.
        doorways: by environment, for those that harnesses play.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        renderer: Renderer,
        generator: TokenGenerator,
        scorers: Mapping[str, AsyncScorer],
        doorways: Mapping[str, Doorway] = MappingProxyType({}),
    ) -> None:
        self._settings = settings
        self._renderer = renderer
        self._generator = generator
        self._scorers = dict(scorers)
        self._doorways = doorways
        self._tool_busy: deque[tuple[float, float]] = deque(maxlen=_INTERVALS)
        self._making = asyncio.Lock()

    async def play(
        self,
        attempt_id: AttemptId,
        place: Place,
        version: int,
        dispatched_s: float,
        sample: int | None = None,
        prefix: Prefix | None = None,
    ) -> PlayedEpisode:
        """Play one attempt, a training one from `version` on by the recipe's update mode, any other under it alone.

        `sample` is as in `EpisodePlan`; with `prefix` the attempt branches off that. Only cancellation is raised.
        """
        setting = await self._setting_at(place)
        config, settings = setting.config, self._settings
        plan = EpisodePlan(
            attempt_id=attempt_id,
            task=setting.task,
            seed=setting.seed,
            sample=sample,
            version=VersionRef(settings.policy_id, version),
            sampling=sampling_params(config, self._renderer),
            budgets=config.budgets.budgets(),
            digests=settings.digests,
            update_mode=settings.update_mode if attempt_id.purpose is Purpose.TRAIN else UpdateMode.STICKY,
            reset_deadline_s=config.reset_deadline_s,
            step_deadline_s=config.step_deadline_s,
            request_deadline_s=settings.request_deadline_s,
            dispatched_s=dispatched_s,
            worker_id=settings.worker_id,
            prefix=prefix.parent if prefix is not None else None,
            branch_step=prefix.step if prefix is not None else None,
        )
        if prefix is None:
            environment = place.worlds.session(setting, attempt_id)
        else:  # it meets what the trunk met on the way
            met = msgspec.structs.replace(prefix.parent, injected_faults=prefix.faults())
            environment = await place.worlds.session_of(met)
        scorer, doorway = self._scorers.get(config.known_as), self._doorways.get(config.known_as)
        if doorway is not None:
            return await play_harness(plan, environment, self._generator, doorway, scorer)
        began = time.time()
        played = await play_episode(plan, environment, self._renderer, self._generator, scorer)
        for turn in played.episode.turns[played.episode.inherited_turns :]:
            if turn.tool_calls:
                self._tool_busy.append((began + turn.tool_calls[0].start_s, began + turn.tool_calls[-1].end_s))
        return played

    def tool_intervals(self, since_s: float) -> list[tuple[float, float]]:
        """When tools ran, as (start, end) in seconds since the epoch, for calls that ended after `since_s`."""
        return [interval for interval in self._tool_busy if interval[1] >= since_s]

    async def close(self) -> None:
        """End the scorers' processes."""
        for scorer in self._scorers.values():
            await scorer.close()

    async def _setting_at(self, place: Place) -> Setting:
        """Made in the order of asking; a user's code may take its time, so it does that in a thread."""
        if place.setting is None:
            async with self._making:
                if place.setting is None and place.worlds.may_block(place.position):
                    place.setting = await asyncio.to_thread(place.worlds.made_setting, place.position)
                elif place.setting is None:
                    place.setting = place.worlds.made_setting(place.position)
        return place.setting
