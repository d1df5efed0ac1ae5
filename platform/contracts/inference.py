"""Engines, and what an episode sees of one."""

from collections.abc import Sequence
from typing import Protocol

from headrace.platform.records.generation import Generation, GenerationRequest
from headrace.platform.records.versions import VersionManifest


class TokenGenerator(Protocol):
    """Continues token ids under a committed version: what an episode sees of an engine or of a whole pool."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample under `request.version`, or where `request.update_mode` allows it under a newer one.

        Cancelling the call cancels the request.

        Raises:
            VersionUnavailable: the version is not held, nor a newer one that would do.
            DeadlineExceeded: `request.deadline_s` passed.
            EngineDead: the engine is gone.
        """

    async def release(self, session: str) -> None:
        """The episode samples no further (P19): its cached keys and values may go. Safe for an unknown session."""

    def versions(self) -> Sequence[int]:
        """The versions that can be asked for now, oldest first."""


class InferenceEngine(TokenGenerator, Protocol):
    """One engine in one process. Holds one or more versions at once; keys and values never cross versions (case S3)."""

    @property
    def capacity(self) -> int:
        """How many versions it can hold at once, at least 1."""

    async def load(self, manifest: VersionManifest, path: str) -> None:
        """Take up a version from the folder `path`. Requests of mode INFLIGHT go on under it from their next token on.

        An engine with room takes it up beside the others. One that is full gives up its oldest: new requests for it are
        refused at once, or held back where the new version will do for them, and the requests of modes STICKY and TURN
        that run on it end first. (Whoever calls sees to it that no sticky session still needs it.)

        On failure the engine serves exactly what it served before, or is dead; never a mixture (case S4).

        Raises:
            EngineError: the folder cannot be loaded.
            EngineDead: the engine is gone.
        """

    async def retire(self, version: int) -> None:
        """Drop a version once its running requests are done."""

    async def close(self) -> None:
        """End running requests with EngineDead and release everything."""
