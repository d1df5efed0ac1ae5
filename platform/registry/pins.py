"""Pins: who still needs a version's files, and until when.

A version is removed in two steps, so that it cannot be deleted under its holder (case Q17): `retire` succeeds only
while nobody holds a pin and from then on refuses new pins; the files go after that. A pin that lapsed protects nothing
(P12).
"""

from collections import defaultdict
from typing import Protocol

from headrace.platform.contracts import Clock


class PinTable(Protocol):
    """Who holds which version. Every method is one atomic step."""

    async def pin(self, version: int, holder: str, ttl_s: float) -> bool:
        """Hold `version` for `ttl_s` seconds from now, or longer if pinned again; False once it was retired."""

    async def unpin(self, version: int, holder: str) -> None:
        """Give the pin back; safe when there is none."""

    async def retire(self, version: int) -> bool:
        """Close `version` to new pins, unless somebody holds it; whether its files may go."""

    async def close(self) -> None:
        """Release connections."""


class MemoryPins:
    """`PinTable` within one process."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until_s: dict[int, dict[str, float]] = defaultdict(dict)
        self._retired: set[int] = set()

    async def pin(self, version: int, holder: str, ttl_s: float) -> bool:
        """See `PinTable.pin`."""
        if version in self._retired:
            return False
        self._until_s[version][holder] = self._clock() + ttl_s
        return True

    async def unpin(self, version: int, holder: str) -> None:
        """See `PinTable.unpin`."""
        self._until_s[version].pop(holder, None)

    async def retire(self, version: int) -> bool:
        """See `PinTable.retire`."""
        now_s = self._clock()
        if any(until_s > now_s for until_s in self._until_s[version].values()):
            return False
        del self._until_s[version]
        self._retired.add(version)
        return True

    async def close(self) -> None:
        """Nothing to release."""
