"""Engines, and what an episode sees of one."""

from collections.abc import Sequence
from typing import Protocol

from headrace.platform.records.generation import Generation, GenerationRequest
from headrace.platform.records.versions import VersionManifest


class TokenGenerator(Protocol):
    """Continues token ids under a committed version: what an episode sees of an engine or of a whole pool."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample under `request.version`. Cancelling the call cancels the request.

        Raises:
            VersionUnavailable: the version is not held.
            DeadlineExceeded: `request.deadline_s` passed.
            EngineDead: the engine is gone.
        """

    async def release(self, session: str) -> None:
        """The episode samples no further (P19): its cached keys and values may go. Safe for an unknown session."""

    def versions(self) -> Sequence[int]:
        """The versions that can be asked for now, oldest first."""


class InferenceEngine(TokenGenerator, Protocol):
    """One engine in one process. Holds one or more versions at once."""

    async def load(self, manifest: VersionManifest, path: str) -> None:
        """Take up a version from the folder `path`. On failure the engine serves exactly what it served before."""

    async def retire(self, version: int) -> None:
        """Drop a version once its running requests are done."""

    async def close(self) -> None:
        """End running requests with EngineDead and release everything."""
