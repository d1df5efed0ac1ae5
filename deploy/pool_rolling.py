"""Tells replicas when to take up another version, where each has room for one and cannot choose by itself (P22).

    [round] ── stats of the replicas that answer ──► next_roll (serving/rolling.py) ──► roll, to one replica
       └── every `EVERY_S`; it waits for nobody: a replica that does not answer in time is left out

Owns nothing: replicas say what they hold and whether they are rolling, the launches which versions evaluations need.
A replica that dies while it rolls is started again empty, and takes up the newest version by itself (case S6).
"""

import asyncio
import logging
from collections.abc import Sequence

from headrace.deploy.ray_launches import Launches
from headrace.deploy.ray_parts import RayPart
from headrace.platform.config import RunConfig
from headrace.platform.errors import HeadraceError
from headrace.platform.records.status import UpdateMode
from headrace.serving.rolling import ReplicaState, Roll, next_roll
from headrace.serving.service import ReplicaStats

EVERY_S = 0.2
_ANSWER_S = 2.0
_log = logging.getLogger(__name__)


def longest_episode_s(config: RunConfig) -> float:
    """How long the slowest episode of a run may be."""
    return max(e.reset_deadline_s + e.budgets.max_seconds + 2 * e.step_deadline_s for e in config.environments)


def state_of(stats: ReplicaStats) -> ReplicaState:
    """What decisions need of a replica. It is held to what an evaluation wants once it has it."""
    return ReplicaState(
        name=stats.replica,
        versions=stats.versions,
        sessions=stats.sessions,
        is_draining=stats.is_draining,
        held=frozenset(stats.held).intersection(stats.versions),
    )


async def answering(replicas: Sequence[RayPart]) -> list[tuple[RayPart, ReplicaStats]]:
    """The counters of the replicas that answer now; nobody is started again for it."""

    async def ask(replica: RayPart) -> tuple[RayPart, ReplicaStats] | None:
        try:
            async with asyncio.timeout(_ANSWER_S):
                return replica, await replica.ask_now("asking for counters", lambda actor: actor.stats.remote())
        except (HeadraceError, TimeoutError):
            return None

    return [each for each in await asyncio.gather(*map(ask, list(replicas))) if each is not None]


class PoolRolling:
    """See the module."""

    def __init__(self, parts: Launches, config: RunConfig) -> None:
        self._parts = parts
        self._is_sticky = config.rollout.update_mode is UpdateMode.STICKY
        # Sessions of the other modes move, so that draining for an evaluation stops none of them.
        self._drain_allowed = config.serving.drain == "allowed" or not self._is_sticky
        self._deadline_s = longest_episode_s(config)
        self._last = ""

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            if self._parts.holds_one:
                await self._round()
            await asyncio.sleep(EVERY_S)

    async def _round(self) -> None:
        there = await answering(self._parts.replicas)
        decision = next_roll(
            [state_of(stats) for _, stats in there],
            newest=max((stats.newest for _, stats in there), default=-1),
            wanted=self._parts.held,
            drain_allowed=self._drain_allowed,
            follows=self._is_sticky,
        )
        if isinstance(decision, Roll):
            await self._tell(decision, {replica.name: replica for replica, _ in there}[decision.replica])
        elif decision != self._last:
            _log.info("no replica rolls: %s", decision)
        self._last = decision if isinstance(decision, str) else ""

    async def _tell(self, roll: Roll, replica: RayPart) -> None:
        _log.info("%s rolls to version %d%s", roll.replica, roll.version, ", and is held to it" if roll.hold else "")
        try:
            async with asyncio.timeout(_ANSWER_S):
                await replica.ask_now(
                    f"rolling to version {roll.version}",
                    lambda actor: actor.roll.remote(roll.version, roll.hold, self._deadline_s),
                )
        except (HeadraceError, TimeoutError) as error:
            _log.warning("%s could not be told to roll: %s", roll.replica, error or "no answer")
