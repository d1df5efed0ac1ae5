"""Replicas that join and leave while a run goes on, as `headrace pool scale` asks for.

    control/pool.json ──► [round] ──► add, or drain and remove, one after the other ──► control/pool.state.json
                             └── every second on a local root, every few seconds elsewhere

Each request ends exactly once, done or with an error; while one is being done, a newer one waits. What a replica that
leaves still plays is waited for, at most as long as an episode may be: none is lost (P22). A run that is resumed begins
with the recipe's number of replicas.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from headrace.deploy.pool_control import PoolControl, PoolReplica, PoolRequest, PoolState
from headrace.deploy.pool_rolling import answering, longest_episode_s, state_of
from headrace.deploy.ray_launches import Launches
from headrace.deploy.ray_parts import CONTROL_DEADLINE_S, RayPart
from headrace.platform.config import RunConfig
from headrace.platform.errors import ConfigError, HeadraceError
from headrace.platform.records.status import UpdateMode
from headrace.platform.store.events import RunEvent
from headrace.serving.rolling import leaving

_LOCAL_EVERY_S, _REMOTE_EVERY_S = 0.5, 5.0
_log = logging.getLogger(__name__)


class PoolScaling:
    """See the module.

    Args:
        parts: the replicas.
        config: the recipe.
        control: where requests come from.
        tell: where it is written down that the pool has changed; `Events.add` is one.
        see: is shown the counters of replicas that leave, which nobody asks any more.
    """

    def __init__(
        self,
        parts: Launches,
        config: RunConfig,
        control: PoolControl,
        tell: Callable[..., None],
        see: Callable[[RayPart, Any], None],
    ) -> None:
        self._parts, self._config = parts, config
        self._control = control
        self._tell, self._see = tell, see
        self._every_s = _LOCAL_EVERY_S if control.is_local else _REMOTE_EVERY_S
        self._state = PoolState()
        self._told: PoolState | None = None
        self._scaling: asyncio.Task[None] | None = None
        self._is_fresh = False
        self._trouble = ""

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                try:
                    await self._round()
                except Exception as error:  # a main loop: files that cannot be read or written end no run
                    if str(error) != self._trouble:
                        _log.warning("the pool hears no requests: %s: %s", type(error).__name__, error)
                    self._trouble = str(error)
                else:
                    self._trouble = ""
                await asyncio.sleep(self._every_s)
        finally:
            if self._scaling is not None:
                self._scaling.cancel()
                await asyncio.gather(self._scaling, return_exceptions=True)

    async def _round(self) -> None:
        if not self._is_fresh:
            await asyncio.to_thread(self._control.forget)
            self._is_fresh = True
        request = await asyncio.to_thread(self._control.request)
        if self._scaling is None and request is not None and request.id != self._state.handled:
            self._scaling = asyncio.create_task(self._scale(request))
        if self._scaling is not None and self._scaling.done():
            scaling, self._scaling = self._scaling, None
            scaling.result()
        await self._say()

    async def _scale(self, request: PoolRequest) -> None:
        was, error = len(self._parts.replicas), ""
        try:
            await self._carry_out(request.replicas)
        except Exception as failure:  # the boundary to Ray and the disk: each request ends exactly once
            error = str(failure) if isinstance(failure, HeadraceError) else repr(failure)
            _log.warning("the pool was not scaled to %d replicas: %s", request.replicas, error)
        now = len(self._parts.replicas)
        self._state = PoolState(handled=request.id, was=was, error=error)
        if now != was:
            await asyncio.to_thread(self._tell, RunEvent.POOL_SCALED, replicas=now, was=was)

    async def _carry_out(self, wanted: int) -> None:
        parts, config = self._parts, self._config
        if wanted < 1:
            raise ConfigError("a pool has at least one replica")
        is_sticky = config.rollout.update_mode is UpdateMode.STICKY
        if wanted == 1 and parts.holds_one and is_sticky and config.serving.drain == "forbidden":
            raise ConfigError(
                "one replica that holds one version cannot take up a new one while sticky episodes run on the old;"
                " use serving.drain=allowed (P22)"
            )
        while len(parts.replicas) < wanted:
            _log.info("%s has joined the pool", await parts.add_replica())
        surplus = len(parts.replicas) - wanted
        if surplus <= 0:
            return
        there = await answering(parts.replicas)
        if len(there) < len(parts.replicas):
            raise ConfigError("a replica does not answer, and is being started again; ask once more when it is back")
        deadline_s = longest_episode_s(config) + CONTROL_DEADLINE_S
        for name in leaving([state_of(stats) for _, stats in there], surplus):
            await parts.remove_replica(name, deadline_s, self._see)
            _log.info("%s has left the pool", name)

    async def _say(self) -> None:
        before = self._state
        replicas = tuple(
            PoolReplica(
                name=stats.replica,
                versions=stats.versions,
                sessions=stats.sessions,
                running=stats.running,
                is_draining=stats.is_draining,
                held=stats.held,
            )
            for _, stats in await answering(self._parts.everyone)
        )
        state = PoolState(replicas=replicas, handled=before.handled, was=before.was, error=before.error)
        if state != self._told:
            await asyncio.to_thread(self._control.tell, state)
            self._told = state
