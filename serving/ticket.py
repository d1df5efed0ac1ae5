"""A request on its way through an engine."""

import asyncio
from dataclasses import dataclass

from headrace.platform.records.generation import Generation, GenerationRequest


@dataclass(kw_only=True, slots=True, eq=False)
class Ticket:
    """The request, who waits for it, and the slot that it has while it runs (None while it waits)."""

    request: GenerationRequest
    future: asyncio.Future[Generation]
    serial: int
    slot: int | None = None
