"""A replica: an engine that follows the published versions. No Ray here; an actor or a test runs it.

::

    registry.watch ─► pin ─► open (hash-checked) ─► engine.load ─► retire, unpin ─► on_change ─┐
          ▲                                                                                    │
          ├────────────────────────────────────────────────────────────────────────────────────┤
          └── told to roll: drain ─► the last session ends ─► pin ─► open ─► load ─► reopen ───┘
    renew the pins ─► engine.retire whatever lapsed ─► …        beside it, at least every third of a pin's time

It consumes committed versions and waits for the next one, for at most `poll_s`; whoever commits unblocks it. Retiring
waits for nobody: only versions without sessions go. A version whose pin lapsed goes at once, sessions or not (P12).
A roll waits for sessions to end, for at most the time that it was given; episodes unblock it.

Owns which versions its engine holds, and their pins. Invariants: it loads the newest committed version and, of those
in between, only one that somebody holds it to (P22), so that new episodes pin the newest that is loaded; a version is
pinned before it is opened and until it is retired (case Q17); a load that fails leaves the engine on what it had, and
is tried again (case S4); every control call has a deadline. `follow` ends when it is cancelled or the engine is dead,
and for no other reason.

An engine that is full gives up a version for a new one. Under `sticky` it gives up none that a session uses: one that
holds a single version takes up another only when it is told to `roll` (rolling.py decides), the first one excepted.
Under `turn` and `inflight` sessions move, so a full engine takes up the newest at once, unless it is held to what it
has.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from headrace.platform.contracts import Clock, VersionRegistry
from headrace.platform.errors import DeadlineExceeded, EngineDead, HeadraceError, NotFound, RegistryError
from headrace.platform.records.status import UpdateMode
from headrace.platform.registry.adapters import load_base_of
from headrace.serving.engine import ServedEngine
from headrace.serving.version_pins import VersionPins

T = TypeVar("T")
_log = logging.getLogger(__name__)
_DRAIN_POLL_S = 0.02


class Gate(Protocol):
    """Where sessions come in; DoorServer is one."""

    @property
    def sessions(self) -> int:
        """Sessions that have asked for something and were not released."""

    def drain(self, grace_s: float) -> None:
        """Finish the sessions that are here, and take no new one after `grace_s`."""

    def reopen(self) -> None:
        """Take new sessions again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Told:
    version: int
    is_held: bool
    deadline_s: float


class Replica:
    """Keeps one engine up to date.

    Args:
        engine: the engine; the replica does not close it.
        name: for messages.
        control_deadline_s: how long opening, loading or retiring a version may take.
        poll_s: how often versions without sessions are looked for while nothing new is published.
        retry_s: the pause before a failed load is tried again.
        pin_ttl_s: how long a pin lasts that is not renewed.
        clock: monotonic.
        update_mode: of the run's training episodes: whether their sessions move to a new version.
        gate: where sessions come in; without one, a replica cannot be told to roll.
        drain_grace_s: how long a gate that drains stays open to sessions that were admitted before and are still on
            their way.
    """

    def __init__(
        self,
        engine: ServedEngine,
        name: str,
        *,
        control_deadline_s: float = 120.0,
        poll_s: float = 0.2,
        retry_s: float = 1.0,
        pin_ttl_s: float = 30.0,
        clock: Clock = time.monotonic,
        update_mode: UpdateMode = UpdateMode.STICKY,
        gate: Gate | None = None,
        drain_grace_s: float = 1.0,
    ) -> None:
        self.engine = engine
        self.failures = 0
        """Control calls that failed since the start."""
        self.last_failure = ""
        self.held: set[int] = set()
        """Versions to keep, and to load where they are missing, whatever is newer: an evaluation samples from them."""
        self.newest = -1
        """The newest committed version that it knows of, loaded or not."""
        self.rolled_s = 0.0
        """Seconds between a last session and the first of the next version: nothing could be sampled meanwhile."""
        self._is_sticky = update_mode is UpdateMode.STICKY
        self._gate = gate
        self._drain_grace_s = drain_grace_s
        self._told: _Told | None = None
        self._name = name
        self._control_deadline_s = control_deadline_s
        self._poll_s, self._retry_s = poll_s, retry_s
        self._pin_ttl_s = pin_ttl_s
        self._clock = clock

    @property
    def is_rolling(self) -> bool:
        """Told to roll, and not done yet."""
        return self._told is not None

    def roll(self, version: int, *, hold: bool = False, drain_deadline_s: float) -> None:
        """Drain, then hold `version`, or unless it is to be held a newer one that is committed by then.

        Returns at once. What is loaded already is only held. One roll at a time: further ones are not heard meanwhile.

        Args:
            version: committed.
            hold: keep it until it is let go, see `held`.
            drain_deadline_s: sessions that need longer are refused afterwards (P23).
        """
        if self._told is not None or self._gate is None:
            return
        if hold:
            self.held.add(version)
        if version not in self.engine.versions():
            self._told = _Told(version=version, is_held=hold, deadline_s=drain_deadline_s)

    async def follow(self, registry: VersionRegistry, keep_versions: int, on_change: Callable[[], None]) -> None:
        """Follow `registry` until cancelled; `on_change` runs whenever the held versions have changed.

        Args:
            registry: where versions come from.
            keep_versions: the newest versions kept, whether or not a session uses them; older ones go with their
                last session.
            on_change: for example, announces the versions to clients.

        Raises:
            EngineDead: the engine is gone.
        """
        # Pins of an earlier life of this replica are its own: nobody renews them, and they lapse.
        pins = VersionPins(registry, f"{self._name}-{secrets.token_hex(4)}", self._pin_ttl_s, self._clock)
        loops = [
            asyncio.create_task(self._follow_versions(registry, pins, keep_versions, on_change)),
            asyncio.create_task(self._keep_pins(pins)),
        ]
        try:
            done, _ = await asyncio.wait(loops, return_when=asyncio.FIRST_COMPLETED)
            for loop in done:
                loop.result()
        finally:
            for loop in loops:
                loop.cancel()
            await asyncio.gather(*loops, return_exceptions=True)

    async def _follow_versions(
        self, registry: VersionRegistry, pins: VersionPins, keep_versions: int, on_change: Callable[[], None]
    ) -> None:
        failed: int | None = None
        is_full = False
        while True:
            before = tuple(self.engine.versions())
            wanted = await self._next_version(registry, failed, is_full)
            if wanted is not None:
                self.newest = max(self.newest, wanted)
                is_full = not await self._make_room(pins)
                if not is_full:
                    failed = None if await self._take_up(registry, pins, wanted) else wanted
            if self._told is not None:
                await self._roll(registry, pins, self._told)
            await self._take_up_held(registry, pins)
            if (
                tuple(self.engine.versions()) != before
            ):  # whoever waits for a new version need not wait for old ones to go
                on_change()
                before = tuple(self.engine.versions())
            await self._retire(pins, keep_versions)
            if tuple(self.engine.versions()) != before:
                on_change()

    async def _take_up_held(self, registry: VersionRegistry, pins: VersionPins) -> None:
        if self.engine.capacity == 1:
            return  # it is told to roll
        for missing in sorted(self.held.difference(self.engine.versions())):
            if not await self._make_room(pins) or not await self._take_up(registry, pins, missing):
                await asyncio.sleep(self._retry_s)

    async def _make_room(self, pins: VersionPins) -> bool:
        """Whether one more version can be loaded, where a full engine gives up its oldest."""
        versions, capacity = self.engine.versions(), self.engine.capacity
        if len(versions) < capacity:
            return True
        if self._told is not None:
            return False
        idle = [each for each in versions if each not in self.held and self.engine.sessions(each) == 0]
        if idle and capacity > 1:
            await self._drop(pins, idle[0])
            return len(self.engine.versions()) < capacity
        return not self._is_sticky and versions[0] not in self.held

    # --- rolling (P22) ------------------------------------------------------------------------------------------------

    async def _roll(self, registry: VersionRegistry, pins: VersionPins, told: _Told) -> None:
        """Ends open again: with the new version, or where that could not be loaded with the old one."""
        assert self._gate is not None
        self._gate.drain(self._drain_grace_s)
        try:
            await self._drained(self._gate, told)
            empty_s = self._clock()
            version = told.version
            if not told.is_held:
                version = await self._next_version(registry, None, True) or version
                self.newest = max(self.newest, version)
            if not await self._take_up(registry, pins, version):
                await asyncio.sleep(self._retry_s)
            self.rolled_s += self._clock() - empty_s
        finally:
            self._told = None
            self._gate.reopen()

    async def _drained(self, gate: Gate, told: _Told) -> None:
        began_s = self._clock()
        while (waited_s := self._clock() - began_s) < told.deadline_s:
            if waited_s >= self._drain_grace_s and gate.sessions == 0:
                return
            await asyncio.sleep(_DRAIN_POLL_S)
        _log.warning(
            "replica %s: %d sessions did not end within %g s, and lose their version",
            self._name,
            gate.sessions,
            told.deadline_s,
        )

    async def _keep_pins(self, pins: VersionPins) -> None:
        """Renew pins, and stop serving what they no longer cover. Draining one version keeps no other's pin waiting."""
        async with asyncio.TaskGroup() as draining:
            while True:
                await asyncio.sleep(pins.renew_in_s)
                for version in await pins.renew():
                    draining.create_task(self._give_up(version))

    async def _give_up(self, version: int) -> None:
        what = f"giving up version {version}, whose pin lapsed,"
        try:
            await self._within(what, self.engine.retire(version))
        except HeadraceError as error:
            self._note(what, error)

    async def _next_version(self, registry: VersionRegistry, failed: int | None, is_full: bool) -> int | None:
        """The number to load next, None when there is nothing to do: a newer one, or after a pause the failed one, or
        the one for which there was no room."""
        held = max(self.engine.versions(), default=-1)
        if failed is None and is_full and self.newest > held:
            failed = self.newest
            after, wait_s = failed, self._poll_s
        else:
            after, wait_s = (held, self._poll_s) if failed is None else (max(held, failed), self._retry_s)
        try:
            manifest = await self._within("watching versions", registry.watch(after, wait_s), wait_s)
        except EngineDead:
            raise
        except HeadraceError as error:
            self._note("watching versions", error)
            await asyncio.sleep(self._retry_s)
            return failed
        return failed if manifest is None else manifest.ref.number

    async def _take_up(self, registry: VersionRegistry, pins: VersionPins, number: int) -> bool:
        what = f"loading version {number}"
        try:
            await self._within(what, pins.take(number))
            manifest, path = await self._within(what, registry.open(number))
            await self._within(what, load_base_of(self.engine, registry, manifest))
            await self._within(what, self.engine.load(manifest, path))
        except EngineDead:
            raise
        except HeadraceError as error:
            self._note(what, error)
            if isinstance(error, NotFound):
                self.held.discard(number)
            if number not in self.engine.versions():  # an engine may have carried through what took too long
                await pins.give_back(number)
                return False
        if number not in pins:
            await self._give_up(number)
            return False
        for given_up in set(pins.versions).difference(self.engine.versions()):
            await pins.give_back(given_up)
        return True

    async def _retire(self, pins: VersionPins, keep_versions: int) -> None:
        for version in list(self.engine.versions())[:-keep_versions]:
            if version not in self.held and self.engine.sessions(version) == 0:
                await self._drop(pins, version)

    async def _drop(self, pins: VersionPins, version: int) -> None:
        try:
            await self._within(f"retiring version {version}", self.engine.retire(version))
        except DeadlineExceeded as error:
            self._note(f"retiring version {version}", error)
        await pins.give_back(version)

    async def _within(self, what: str, work: Awaitable[T], extra_s: float = 0.0) -> T:
        deadline_s = self._control_deadline_s + extra_s
        try:
            async with asyncio.timeout(deadline_s):
                return await work
        except HeadraceError:
            raise
        except TimeoutError:
            raise DeadlineExceeded(f"replica {self._name}: {what} took over {deadline_s} s") from None
        except OSError as error:  # where versions lie: a disk, or a store that is away
            raise RegistryError(f"replica {self._name}: {what}: {type(error).__name__}: {error}") from error

    def _note(self, what: str, error: HeadraceError) -> None:
        self.failures += 1
        self.last_failure = f"{what}: {error}"
        _log.warning("replica %s: %s failed: %s", self._name, what, error)
