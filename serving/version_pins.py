"""The pins of one replica: versions that it holds stay in the registry, and one whose pin lapsed is given up (P12).

A pin is a lease of `ttl_s` seconds of the server's time. Whoever renews it measures from before the renewal was sent,
on its own monotonic clock, so it never believes in a pin for longer than the server does.
"""

import asyncio
import logging
from collections.abc import Sequence

from headrace.platform.contracts import Clock, VersionRegistry
from headrace.platform.errors import HeadraceError, NotFound

_log = logging.getLogger(__name__)
_RENEWALS_PER_TTL = 3
_LAST_TRY_S = 1.0


class VersionPins:
    """Pins of `holder`, a name that no other process and no other life of this one has."""

    def __init__(self, registry: VersionRegistry, holder: str, ttl_s: float, clock: Clock) -> None:
        self._registry = registry
        self._holder = holder
        self._ttl_s = ttl_s
        self._clock = clock
        self._until_s: dict[int, float] = {}

    def __contains__(self, version: int) -> bool:
        return version in self._until_s

    @property
    def versions(self) -> Sequence[int]:
        """What is pinned."""
        return sorted(self._until_s)

    @property
    def renew_in_s(self) -> float:
        """How long to wait before the next `renew`: so that a pin is renewed in good time, or given up in time."""
        soonest_s = min(self._until_s.values(), default=float("inf")) - self._clock()
        return max(min(self._ttl_s / _RENEWALS_PER_TTL, soonest_s), 0.0)

    async def take(self, version: int) -> None:
        """Pin a version before it is opened (case Q17). Raises NotFound when it is gone, and LedgerAway."""
        asked_s = self._clock()
        await self._registry.pin(version, self._holder, self._ttl_s)
        self._until_s[version] = asked_s + self._ttl_s

    async def give_back(self, version: int) -> None:
        """The version is held no longer. Where the server cannot be told, the pin runs out."""
        if self._until_s.pop(version, None) is not None:
            try:
                await self._registry.unpin(version, self._holder)
            except (HeadraceError, OSError) as error:
                _log.warning("the pin of version %d runs out by itself: %s", version, error)

    async def renew(self) -> Sequence[int]:
        """Renew all pins; the versions that may be held no longer: removed, or not renewed within their time.

        A server that is away is no lapse by itself (P12).
        """
        versions = sorted(self._until_s)
        lapsed = await asyncio.gather(*(self._has_lapsed(version) for version in versions))
        return [version for version, is_lapsed in zip(versions, lapsed, strict=True) if is_lapsed]

    async def _has_lapsed(self, version: int) -> bool:
        asked_s = self._clock()
        try:
            # Whoever was stopped beyond the pin's end may still find the version there, and goes on then.
            async with asyncio.timeout(max(self._until_s.get(version, asked_s) - asked_s, _LAST_TRY_S)):
                await self._registry.pin(version, self._holder, self._ttl_s)
        except NotFound as error:
            _log.warning("%s", error)
            lapsed = True
        except (HeadraceError, OSError) as error:  # a TimeoutError, too
            _log.warning("the pin of version %d was not renewed: %s", version, error or "no answer in time")
            lapsed = self._until_s.get(version, asked_s) <= self._clock()
        else:
            return await self._renewed(version, asked_s)
        if lapsed:
            self._until_s.pop(version, None)
        return lapsed

    async def _renewed(self, version: int, asked_s: float) -> bool:
        if version in self._until_s:
            self._until_s[version] = asked_s + self._ttl_s
        else:  # given back meanwhile: this renewal came after that
            self._until_s[version] = asked_s
            await self.give_back(version)
        return False
