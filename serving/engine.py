"""What a replica needs of an engine beyond the contract: who still uses a version, and counts for its statistics."""

from dataclasses import dataclass
from typing import Protocol

from headrace.platform.contracts import InferenceEngine
from headrace.platform.registry.adapters import BaseHolder


@dataclass(kw_only=True, slots=True, frozen=True)
class EngineStats:
    """Tokens since the start, and requests now. `reused_tokens` were found in the cache instead of being prefilled."""

    sampled_tokens: int
    prefilled_tokens: int
    reused_tokens: int
    running: int
    waiting: int


class ServedEngine(InferenceEngine, BaseHolder, Protocol):
    """An engine that a replica can serve."""

    def sessions(self, version: int) -> int:
        """Live sessions whose latest request was served under `version`, and that were not released."""

    def stats(self) -> EngineStats:
        """Counts now."""

    def busy_intervals(self, since: float) -> list[tuple[float, float]]:
        """When it computed, as (start, end) in seconds since the epoch, from `since` on."""
        raise NotImplementedError

    async def wait_dead(self) -> str:
        """Returns why, as soon as the engine is dead; waits for ever while it is not."""
