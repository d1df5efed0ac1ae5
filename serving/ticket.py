"""A request on its way through an engine, from version to version where its mode allows it."""

import asyncio
from dataclasses import dataclass

from headrace.platform.records.generation import Generation, GenerationRequest
from headrace.platform.records.versions import VersionSpan


@dataclass(kw_only=True, slots=True, eq=False)
class Ticket:
    """The request, who waits for it, and the slot that it has while it runs (None while it waits).

    `version` is the one that serves it now. `spans` are the tokens that earlier ones have sampled for it.
    """

    request: GenerationRequest
    future: asyncio.Future[Generation]
    serial: int
    version: int
    slot: int | None = None
    spans: tuple[VersionSpan, ...] = ()

    @property
    def sampled(self) -> int:
        """How many tokens earlier versions have sampled."""
        return self.spans[-1].end if self.spans else 0
