"""The requests of one version that are running, as arrays: one row a request.

Owns the rows and the bookkeeping after each sampled token, for the whole batch at once. A row has the position of the
last token that is known; the tokens of its slot after `cached` and up to that position are what the model still has to
see, so a request that has just joined and one in the middle of decoding differ in nothing but that number.
"""

# B rows, S stop ids of a row

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.platform.records.generation import Generation, SamplingParams
from headrace.platform.records.status import FinishReason
from headrace.platform.records.versions import VersionRef, VersionSpan
from headrace.serving.sampling import F64, I64, is_plain
from headrace.serving.slot_table import SlotTable
from headrace.serving.ticket import Ticket

ROW = np.dtype(
    [("slot", "i8"), ("position", "i8"), ("last", "i8"), ("seed", "u8"), ("temperature", "f8"), ("plain", "?")]
)
"""`last` is the highest position that may be sampled, from the request's limit and the slot's size."""


@dataclass(kw_only=True, slots=True)
class Finished:
    """A row that has left: its generation, or None where the logits had no distribution."""

    ticket: Ticket
    generation: Generation | None


class RunningBatch:
    """The running rows of one version."""

    def __init__(self, ref: VersionRef, table: SlotTable, replica: str, build: str) -> None:
        self.rows: npt.NDArray[Any] = np.zeros(0, ROW)
        self._ref = ref
        self._table = table
        self._replica = replica
        self._build = build
        self._tickets: npt.NDArray[np.object_] = np.zeros(0, object)
        self._stops: npt.NDArray[np.int64] = np.zeros((0, 1), np.int64)

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def tickets(self) -> list[Ticket]:
        """The running requests."""
        return list(self._tickets)

    @property
    def truncated(self) -> dict[int, SamplingParams]:
        """The rows whose distribution is cut, with their parameters."""
        return {int(row): self._tickets[row].request.sampling for row in np.flatnonzero(~self.rows["plain"])}

    def join(self, tickets: list[Ticket]) -> None:
        """Add requests whose slots are filled: with their context, and with what other versions have sampled."""
        width = max(self._stops.shape[1], *(len(ticket.request.sampling.stop_token_ids) for ticket in tickets))
        rows, stops = np.zeros(len(tickets), ROW), np.full((len(self) + len(tickets), width), -1, np.int64)
        stops[: len(self), : self._stops.shape[1]] = self._stops
        for row, ticket in enumerate(tickets):
            request, length = ticket.request, len(ticket.request.token_ids)
            sampling = request.sampling
            position = length + ticket.sampled - 1
            last = min(length + sampling.max_new_tokens, self._table.positions) - 1
            seed = request.seed & 0xFFFFFFFFFFFFFFFF
            rows[row] = (ticket.slot, position, last, seed, sampling.temperature, is_plain(sampling))
            stops[len(self) + row, : len(sampling.stop_token_ids)] = sampling.stop_token_ids
        added = np.empty(len(tickets), object)
        added[:] = tickets
        self.rows = np.concatenate([self.rows, rows])
        self._tickets = np.concatenate([self._tickets, added])
        self._stops = stops

    def remove(self, tickets: Iterable[Ticket]) -> None:
        """Take requests out, as they are."""
        gone = set(map(id, tickets))
        self._keep(np.array([id(ticket) not in gone for ticket in self._tickets], bool))

    def hand_over(self, tickets: Iterable[Ticket]) -> None:
        """Take requests out that go on in another version's batch: what was sampled here is written down."""
        leaving = set(map(id, tickets))
        for ticket, position in zip(self._tickets, self.rows["position"].tolist(), strict=True):
            if id(ticket) in leaving:
                ticket.spans = self._spans(ticket, position + 1 - len(ticket.request.token_ids))
        self.remove(tickets)

    def record(self, tokens: I64, logprobs: F64) -> list[Finished]:
        """Append one sampled token a row, [B] each, and return the rows that ended. A token -1 ends its row."""
        rows, table = self.rows, self._table
        sound = tokens >= 0
        table.cached[rows["slot"]] = rows["position"] + 1
        rows["position"] += sound
        table.ids[rows["slot"][sound], rows["position"][sound]] = tokens[sound]
        table.logprobs[rows["slot"][sound], rows["position"][sound]] = logprobs[sound]
        stopped = (self._stops == tokens[:, None]).any(axis=1) & sound
        ended = stopped | (rows["position"] >= rows["last"]) | ~sound
        if not ended.any():
            return []
        finished = [
            Finished(
                ticket=self._tickets[row],
                generation=self._generation(row, bool(stopped[row])) if sound[row] else None,
            )
            for row in np.flatnonzero(ended)
        ]
        self._keep(~ended)
        return finished

    def _generation(self, row: int, stopped: bool) -> Generation:
        slot, end = int(self.rows["slot"][row]), int(self.rows["position"][row]) + 1
        ticket: Ticket = self._tickets[row]
        start = len(ticket.request.token_ids)
        return Generation(
            token_ids=self._table.ids[slot, start:end].copy(),
            logprobs=self._table.logprobs[slot, start:end].copy(),
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            version_spans=self._spans(ticket, end - start),
            replica=self._replica,
            engine_build=self._build,
        )

    def _spans(self, ticket: Ticket, sampled: int) -> tuple[VersionSpan, ...]:
        """Who sampled the first `sampled` tokens, in order and without gaps."""
        if sampled == ticket.sampled:
            return ticket.spans
        return (*ticket.spans, VersionSpan(self._ref, ticket.sampled, sampled))

    def _keep(self, kept: npt.NDArray[np.bool_]) -> None:
        self.rows, self._tickets, self._stops = self.rows[kept], self._tickets[kept], self._stops[kept]
