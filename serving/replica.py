"""A replica: an engine that follows the published versions. No Ray here; an actor or a test runs it.

::

    registry.watch ─► pin ─► open (hash-checked) ─► engine.load ─► retire, unpin ─► on_change ─┐
          ▲                                                                                    │
          └────────────────────────────────────────────────────────────────────────────────────┘
    renew the pins ─► engine.retire whatever lapsed ─► …        beside it, at least every third of a pin's time

It consumes committed versions and waits for the next one, for at most `poll_s`; whoever commits unblocks it. Retiring
waits for nobody: only versions without sessions go. A version whose pin lapsed goes at once, sessions or not (P12).

Owns which versions its engine holds, and their pins. Invariants: it loads the newest committed version and, of those
in between, only one that somebody holds it to (P22), so that new episodes pin the newest that is loaded; a version is
pinned before it is opened and until it is retired (case Q17); a load that fails leaves the engine on what it had, and
is tried again (case S4); every control call has a deadline. `follow` ends when it is cancelled or the engine is dead,
and for no other reason.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from headrace.platform.contracts import Clock, VersionRegistry
from headrace.platform.errors import DeadlineExceeded, EngineDead, HeadraceError, NotFound
from headrace.serving.engine import ServedEngine
from headrace.serving.version_pins import VersionPins

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Replica:
    """Keeps one engine up to date.

    Args:
        engine: the engine; the replica does not close it.
        name: for messages.
        control_deadline_s: how long opening, loading or retiring a version may take.
        poll_s: how often versions without sessions are looked for while nothing new is published.
        retry_s: the pause before a failed load is tried again.
        pin_ttl_s: how long a pin lasts that is not renewed.
        clock: monotonic, for the pins.
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
    ) -> None:
        self.engine = engine
        self.failures = 0
        """Control calls that failed since the start."""
        self.last_failure = ""
        self.held: set[int] = set()
        """Versions to keep, and to load where they are missing, whatever is newer: an evaluation samples from them."""
        self._name = name
        self._control_deadline_s = control_deadline_s
        self._poll_s, self._retry_s = poll_s, retry_s
        self._pin_ttl_s = pin_ttl_s
        self._clock = clock

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
        while True:
            before = tuple(self.engine.versions())
            wanted = await self._next_version(registry, failed)
            if wanted is not None:
                failed = None if await self._take_up(registry, pins, wanted) else wanted
            for missing in sorted(self.held.difference(self.engine.versions())):
                if not await self._take_up(registry, pins, missing):
                    await asyncio.sleep(self._retry_s)
            await self._retire(pins, keep_versions)
            if tuple(self.engine.versions()) != before:
                on_change()

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

    async def _next_version(self, registry: VersionRegistry, failed: int | None) -> int | None:
        """The number to load next, None when there is nothing to do: a newer one, or after a pause the failed one."""
        held = max(self.engine.versions(), default=-1)
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
            await self._within(what, self.engine.load(manifest, path))
        except EngineDead:
            raise
        except HeadraceError as error:
            self._note(what, error)
            if isinstance(error, NotFound):
                self.held.discard(number)
            await pins.give_back(number)
            return False
        if number not in pins:
            await self._give_up(number)
            return False
        return True

    async def _retire(self, pins: VersionPins, keep_versions: int) -> None:
        for version in list(self.engine.versions())[:-keep_versions]:
            if version not in self.held and self.engine.sessions(version) == 0:
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
        except DeadlineExceeded:
            raise
        except TimeoutError:
            raise DeadlineExceeded(f"replica {self._name}: {what} took over {deadline_s} s") from None

    def _note(self, what: str, error: HeadraceError) -> None:
        self.failures += 1
        self.last_failure = f"{what}: {error}"
        _log.warning("replica %s: %s failed: %s", self._name, what, error)
