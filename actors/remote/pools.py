"""The hosts of one environment, as one process uses them.

A pool knows addresses (from the recipe, or from a registry file that it reads again whenever it changes), finds a place
for each session, and learns from every answer. It never plays: sessions do, and give their place back. All sessions of
a group meet one version (P17). What waits for a place asks again every moment until its time is up; then HostAway says
of each host why it would not.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.actors.environments.adapter import AsyncEnvironment
from headrace.actors.remote import openenv
from headrace.actors.remote.client import Place, Refused, RemoteEnvironment, greet
from headrace.actors.remote.group_version import GroupVersion
from headrace.actors.remote.known_hosts import HostState, KnownHost, choose, complaints, is_played_nowhere
from headrace.actors.remote.link import Link, open_link
from headrace.actors.remote.protocol import PROTOCOL, Code, Hello
from headrace.actors.remote.registry_file import read_registry
from headrace.platform.config.pools import PoolConfig, wrong_address
from headrace.platform.errors import ConfigError, DeadlineExceeded, HostAway

_log = logging.getLogger(__name__)
_LOOK_S = 0.5
_PAUSE_S = (0.02, 0.25)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostStatus:
    """One host for `headrace status`: `sessions` are this pool's."""

    address: str
    version: str
    state: str
    sessions: int


class EnvironmentPool:
    """Shared by all sessions of one process; belongs to one event loop.

    Args:
        config: which hosts, and how to reach them.
        environment: what they should play, as the recipe names it.
        token: what they ask for, resolved.
        args: with the protocol `openenv`, how its actions and observations are read (see `openenv.py`).

    Raises:
        ConfigError: for wrong `args`.
    """

    def __init__(self, config: PoolConfig, environment: str, token: str, args: Mapping[str, Any] | None = None) -> None:
        self.environment = environment
        self._config, self._token = config, token
        self._known = {address: KnownHost(address=address) for address in config.hosts}
        self._open: set[Link] = set()
        self._registry = _Registry(Path(config.source)) if config.source else None
        self._form = openenv.form_of(args or {}) if config.protocol == "openenv" else None
        self._greet: Callable[[Link, float], Awaitable[Hello]] = greet
        if self._form is not None:
            self._greet = openenv.Greeter(environment, token, self._form.version)

    def session(self, group: GroupVersion, max_wait_s: float, step_s: float = 600.0) -> AsyncEnvironment:
        """A session that is connected in its reset. Never raises.

        Args:
            group: shared by all sessions of a group (P17).
            max_wait_s: how long its reset may take; it gives up a little earlier, to say why.
            step_s: how long a step may take, for callers without a deadline of their own.
        """
        begin_s = max_wait_s - min(1.0, 0.1 * max_wait_s)
        if self._form is not None:
            return openenv.OpenEnvSession(self, group, begin_s, step_s, self._form)
        return RemoteEnvironment(self, group, begin_s, step_s)

    def hosts(self) -> Sequence[HostStatus]:
        """What is known of each host."""
        return [
            HostStatus(address=each.address, version=each.version or "", state=each.state, sessions=each.ours)
            for each in self._known.values()
        ]

    async def close(self) -> None:
        """End every connection. Safe to call twice."""
        await asyncio.gather(*(link.close() for link in list(self._open)))
        self._open.clear()

    # --- for sessions -------------------------------------------------------------------------------------------------

    async def place(self, group: GroupVersion, ends: float) -> Place:
        """A connection to a host that plays what the group plays, whose version it has taken.

        Args:
            group: see `session`.
            ends: time of the event loop at which it gives up.

        Raises:
            HostAway: there was none in time, or hosts of other versions only.
        """
        loop = asyncio.get_running_loop()
        pause_s, began = _PAUSE_S[0], loop.time()
        while True:
            await self._look()
            wanted = self._config.versions if group.version is None else (group.version,)
            now, hosts = loop.time(), list(self._known.values())
            if now >= ends and now > began:
                raise self._nowhere(f"no host took a session within {now - began:.3g} s", wanted)
            host = choose(hosts, wanted, now)
            if host is not None:
                if (place := await self._tried(host, group, ends - now)) is not None:
                    return place
            elif group.version is not None and is_played_nowhere(hosts, group.version, now):
                raise self._nowhere(f"the group is played in version {group.version}, and no host has it", wanted)
            else:
                await asyncio.sleep(min(pause_s, max(ends - now, 0)))
                pause_s = min(2 * pause_s, _PAUSE_S[1])

    def refused(self, place: Place, code: Code, why: str) -> None:
        """A host did not begin a session."""
        state = HostState.DRAINING if code is Code.DRAINING else HostState.FULL
        place.host.failed(state, why, asyncio.get_running_loop().time())

    def lost(self, place: Place, why: str) -> None:
        """A host left a session."""
        place.host.failed(HostState.AWAY, why, asyncio.get_running_loop().time())

    async def release(self, place: Place) -> None:
        """A session is over."""
        try:
            await place.link.close()
        finally:
            self._open.discard(place.link)
            self._give_back(place.host)

    # --- inside -------------------------------------------------------------------------------------------------------

    async def _tried(self, host: KnownHost, group: GroupVersion, seconds: float) -> Place | None:
        """A place on `host`, None where it would not; then the host knows why."""
        host.ours += 1
        place = None
        try:
            place = await self._connected(host, group, max(min(seconds, self._config.connect_s), 0.01))
        except Refused as refusal:
            state = HostState.DRAINING if refusal.code is Code.DRAINING else HostState.FULL
            host.failed(state, str(refusal), asyncio.get_running_loop().time())
        except (HostAway, DeadlineExceeded) as error:
            host.failed(HostState.AWAY, str(error), asyncio.get_running_loop().time())
        finally:
            if place is None:
                self._give_back(host)
        return place

    async def _connected(self, host: KnownHost, group: GroupVersion, seconds: float) -> Place | None:
        """A connection whose version the group has taken, None for another version."""
        link = await open_link(host.address, self._token, seconds)
        self._open.add(link)
        is_kept = False
        try:
            hello = await self._greet(link, seconds)
            self._check(hello, host)
            host.greeted(hello, asyncio.get_running_loop().time())
            allowed = self._config.versions
            is_kept = (not allowed or hello.version in allowed) and group.take(hello.version)
            return Place(host=host, link=link, hello=hello) if is_kept else None
        finally:
            if not is_kept:
                self._open.discard(link)
                await link.close()

    def _check(self, hello: Hello, host: KnownHost) -> None:
        """Raises HostAway for a host that plays something else, or speaks another protocol."""
        if hello.protocol != PROTOCOL:
            raise HostAway(f"{host.address} speaks protocol {hello.protocol}, this headrace {PROTOCOL}")
        own = self.environment.rpartition("/")[2]
        if self._form is None and own not in (hello.environment, hello.target):
            raise HostAway(f"{host.address} plays {hello.environment} ({hello.target}), not {own}")

    def _give_back(self, host: KnownHost) -> None:
        host.ours -= 1
        if host.has_left and not host.ours:
            self._known.pop(host.address, None)

    def _nowhere(self, what: str, wanted: Collection[str]) -> HostAway:
        hosts = [each for each in self._known.values() if not each.has_left]
        told = complaints(hosts, wanted) if hosts else "there are none"
        where = f" of {self._config.source}" if self._config.source else ""
        problem = f" ({self._registry.problem})" if self._registry is not None and self._registry.problem else ""
        return HostAway(f"{self.environment}: {what}; hosts{where}: {told}{problem}")

    async def _look(self) -> None:
        """Read the registry again if it has changed: hosts come and go."""
        if self._registry is None:
            return
        addresses = await self._registry.news(asyncio.get_running_loop().time())
        if addresses is None:
            return
        for address in addresses:
            host = self._known.setdefault(address, KnownHost(address=address))
            if host.has_left:
                host.has_left, host.not_before_s, host.failures = False, float("-inf"), 0
        for address, host in list(self._known.items()):
            if address not in addresses:
                host.has_left = True
                if not host.ours:
                    del self._known[address]


class _Registry:
    """A registry file as a reader sees it: looked at every now and then, read when it has changed."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._looked = float("-inf")
        self._stamp: tuple[int, ...] = ()
        self.problem = ""

    async def news(self, now: float) -> list[str] | None:
        """The addresses, None where nothing is new."""
        if now - self._looked < _LOOK_S:
            return None
        self._looked = now
        return await asyncio.to_thread(self._read)

    def _read(self) -> list[str] | None:
        try:
            found = self._file.stat()
            stamp = (found.st_mtime_ns, found.st_size, found.st_ino)
            if stamp == self._stamp:
                return None
            addresses = read_registry(self._file)
        except (OSError, ConfigError) as error:  # what was known last still holds
            if self.problem != str(error):
                _log.warning("the registry cannot be read: %s", error)
            self.problem = str(error)
            return None
        wrong = list(filter(None, map(wrong_address, addresses)))
        problem = f"{len(wrong)} of its addresses cannot be used: {wrong[0]}" if wrong else ""
        if problem and problem != self.problem:
            _log.warning("%s: %s", self._file, problem)
        self._stamp, self.problem = stamp, problem
        return [each for each in addresses if not wrong_address(each)]
