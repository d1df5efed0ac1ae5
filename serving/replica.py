"""A replica: an engine that follows the published versions. No Ray here; an actor or a test runs it.

::

    registry.watch ─► open (hash-checked) ─► engine.load ─► retire ─► on_change ─┐
          ▲                                                                      │
          └──────────────────────────────────────────────────────────────────────┘

It consumes committed versions and waits for the next one, for at most `poll_s`; whoever commits unblocks it. Retiring
waits for nobody: only versions without sessions go.

Owns which versions its engine holds. Invariants: it loads the newest committed version and, of those in between, only
one that somebody holds it to (P22);
a load that fails leaves the engine on what it had, and is tried again (case S4); every control call has a deadline.
`follow` ends when it is cancelled or the engine is dead, and for no other reason.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from headrace.platform.contracts import InferenceEngine, VersionRegistry
from headrace.platform.errors import DeadlineExceeded, EngineDead, HeadraceError

T = TypeVar("T")
_log = logging.getLogger(__name__)


class ServedEngine(InferenceEngine, Protocol):
    """An engine that knows who still needs a version."""

    def sessions(self, version: int) -> int:
        """Live sessions whose latest request named `version`."""


class Replica:
    """Keeps one engine up to date.

    Args:
        engine: the engine; the replica does not close it.
        name: for messages.
        control_deadline_s: how long opening, loading or retiring a version may take.
        poll_s: how often versions without sessions are looked for while nothing new is published.
        retry_s: the pause before a failed load is tried again.
    """

    def __init__(
        self,
        engine: ServedEngine,
        name: str,
        *,
        control_deadline_s: float = 120.0,
        poll_s: float = 0.2,
        retry_s: float = 1.0,
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
        failed: int | None = None
        while True:
            before = tuple(self.engine.versions())
            wanted = await self._next_version(registry, failed)
            if wanted is not None:
                failed = None if await self._take_up(registry, wanted) else wanted
            for missing in sorted(self.held.difference(self.engine.versions())):
                await self._take_up(registry, missing)
            await self._retire(keep_versions)
            if tuple(self.engine.versions()) != before:
                on_change()

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

    async def _take_up(self, registry: VersionRegistry, number: int) -> bool:
        what = f"loading version {number}"
        try:
            manifest, path = await self._within(what, registry.open(number))
            await self._within(what, self.engine.load(manifest, path))
        except EngineDead:
            raise
        except HeadraceError as error:
            self._note(what, error)
            return False
        return True

    async def _retire(self, keep_versions: int) -> None:
        for version in list(self.engine.versions())[:-keep_versions]:
            if version not in self.held and self.engine.sessions(version) == 0:
                try:
                    await self._within(f"retiring version {version}", self.engine.retire(version))
                except DeadlineExceeded as error:
                    self._note(f"retiring version {version}", error)

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
