"""What worlds stand on in one process: threads for blocking code, sandboxes, hosts, and the way to the gateway.

Shared by the worlds of all splits, so that limits such as `sandbox.max_boxes` hold for all of them together. Nothing is
started before it is needed, and nothing is weaker than the recipe accepts.
"""

import asyncio
import contextlib
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.actors.environments.late import Builder
from headrace.actors.gateway.place import GatewayPlace, private_place
from headrace.platform.config.environments import EnvironmentConfig
from headrace.platform.config.pools import PoolConfig
from headrace.platform.config.sandbox import SandboxConfig
from headrace.platform.config.secret_references import resolve
from headrace.platform.contracts import SandboxProvider
from headrace.platform.errors import GatewayAway
from headrace.platform.node_cache import node_cache

if TYPE_CHECKING:
    from headrace.actors.gateway.client import GatewayClient
    from headrace.actors.remote.pools import EnvironmentPool

_log = logging.getLogger(__name__)
# Threads are made when a plain environment needs one; each blocked session takes one (case E11).
_MOST_BLOCKED = 1024
_MOST_TOLD = 400


class WorldResources:
    """Makes each thing once, on first use.

    Args:
        state: where sandboxes keep their files on this node.
        gateway: where the gateway lives; None for one that belongs to this process.
    """

    def __init__(self, state: Path | None = None, gateway: GatewayPlace | None = None) -> None:
        self._state = state or node_cache() / "sandboxes"
        self._gateway = gateway
        self._doors: dict[asyncio.AbstractEventLoop, asyncio.Task[GatewayClient]] = {}
        self._providers: dict[SandboxConfig, SandboxProvider] = {}
        self._pools: dict[tuple[str, PoolConfig], EnvironmentPool] = {}
        self._opening = threading.Lock()  # sessions are built in threads

    @cached_property
    def threads(self) -> ThreadPoolExecutor:
        """Where plain methods of environments run."""
        return ThreadPoolExecutor(_MOST_BLOCKED, thread_name_prefix="environment")

    @cached_property
    def builder(self) -> Builder:
        """Where environments are built whose code is somebody else's."""
        return Builder(self.threads)

    def sandboxes(self, config: SandboxConfig) -> SandboxProvider:
        """Who makes boxes of this kind. Raises ConfigError where none that is accepted works on this host."""
        with self._opening:
            if config not in self._providers:
                from headrace.actors.sandboxes.opening import provider_for

                provider = self._providers[config] = provider_for(config, self._state)
                _log.info("sandboxes: %s", provider.mode)
            return self._providers[config]

    def pool(self, config: EnvironmentConfig) -> "EnvironmentPool":
        """The hosts of an environment. Raises ConfigError for a token that cannot be resolved, and for args."""
        if config.pool is None:
            raise ValueError(f"{config.known_as} has no pool")
        key = (config.known_as, config.pool)
        if key not in self._pools:
            from headrace.actors.remote.pools import EnvironmentPool

            self._pools[key] = EnvironmentPool(config.pool, config.name, resolve(config.pool.token), config.args)
        return self._pools[key]

    async def gateway(self) -> "GatewayClient":
        """The way to the gateway of this node, which is started where there is none. Raises GatewayAway."""
        loop = asyncio.get_running_loop()
        opening = self._doors.get(loop)
        if opening is None or (opening.done() and (opening.cancelled() or opening.exception() is not None)):
            opening = self._doors[loop] = loop.create_task(self._open_gateway())
        return await asyncio.shield(opening)

    async def _open_gateway(self) -> "GatewayClient":
        from headrace.actors.gateway.start import open_gateway

        place = self._gateway or private_place()
        return await open_gateway(place.home, place.audit, place.config, linger_s=place.linger_s)

    def hosts(self) -> str:
        """The hosts of all pools that were asked for, their states and sessions, on one line; empty without a pool."""
        known = [host for pool in self._pools.values() for host in pool.hosts()]
        return "; ".join(f"{each.address} {each.state} ({each.sessions} sessions)" for each in known)[:_MOST_TOLD]

    async def close(self) -> None:
        """Close every box and every connection, after the sessions that were left to be built."""
        await self.builder.close()
        if (opening := self._doors.pop(asyncio.get_running_loop(), None)) is not None:
            opening.cancel()
            with contextlib.suppress(asyncio.CancelledError, GatewayAway):
                await (await opening).close()
        for pool in self._pools.values():
            await pool.close()
        for provider in self._providers.values():
            await provider.close()
        self._pools.clear()
        self._providers.clear()
