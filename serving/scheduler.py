"""Which requests run next. Pure bookkeeping: no tensors, no clock, no waiting.

Owns the waiting lines, admission to slots and batches, and which session uses which version. Requests of a version are
admitted in order of arrival, older versions first, for those are on their way out (P22). A request whose session has
another one running waits for it, and does not hold up those behind it. When a newer version comes, waiting requests
that may (TURN, INFLIGHT) change to its line, and running ones that may (INFLIGHT) to its batch; no request ever goes
back. Everything is called from the event loop between two steps, except where said.
"""

import asyncio
from collections import OrderedDict
from itertools import chain

from headrace.platform.errors import EngineDead
from headrace.platform.records.generation import Generation, GenerationRequest
from headrace.platform.records.status import UpdateMode
from headrace.platform.records.versions import VersionRef
from headrace.serving.batch import Finished, RunningBatch
from headrace.serving.slot_table import SlotTable
from headrace.serving.ticket import Ticket

_STICKY = UpdateMode.STICKY


class Scheduler:
    """The requests of one engine.

    Args:
        max_sessions: slots.
        max_batch: rows that run together, per version.
        max_positions: the longest context, in tokens.
        session_ttl_s: a session not heard of for so long no longer keeps its version alive: its client is gone.
        replica: named in every generation.
        build: named in every generation.
    """

    def __init__(
        self, *, max_sessions: int, max_batch: int, max_positions: int, session_ttl_s: float, replica: str, build: str
    ) -> None:
        self.table = SlotTable(max_sessions, max_positions)
        self.batches: dict[int, RunningBatch] = {}
        self.has_news = False
        """Something waits to be looked at between steps. Read, without harm, from the step's thread too."""
        self.reused_tokens = 0
        self.prefilled_tokens = 0
        self._max_batch = max_batch
        self._session_ttl_s = session_ttl_s
        self._replica, self._build = replica, build
        self._waiting: dict[int, OrderedDict[int, Ticket]] = {}
        self._gone: dict[int, Ticket] = {}
        self._taken_up: set[int] = set()
        self._sessions: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._serial = 0

    @property
    def running(self) -> int:
        """Requests in batches."""
        return sum(map(len, self.batches.values()))

    @property
    def waiting(self) -> int:
        """Requests in line."""
        return sum(map(len, self._waiting.values()))

    def open(self, ref: VersionRef) -> None:
        """Take requests for a version. Those of older ones that may go on under it do so before the next step."""
        self.batches[ref.number] = RunningBatch(ref, self.table, self._replica, self._build)
        self._waiting[ref.number] = OrderedDict()
        self._taken_up.add(ref.number)
        self.has_news = True

    def close(self, version: int) -> None:
        """Forget a version that has no requests, and its slots."""
        del self.batches[version], self._waiting[version]
        self._taken_up.discard(version)
        self.table.retire(version)

    def is_used(self, version: int) -> bool:
        """A request of this version waits or runs."""
        return bool(self._waiting[version]) or len(self.batches[version]) > 0

    def sessions(self, version: int, now_s: float) -> int:
        """Sessions that `version` served last or serves now, not released, and heard of within their time to live."""
        while self._sessions:
            session, (_, heard_s) = next(iter(self._sessions.items()))
            if now_s - heard_s < self._session_ttl_s:
                break
            self.release(session)
        return sum(held == version for held, _ in self._sessions.values())

    def submit(
        self, request: GenerationRequest, version: int, future: asyncio.Future[Generation], now_s: float
    ) -> Ticket:
        """Put a request in the line of the version that is to serve it."""
        self._serial += 1
        ticket = Ticket(request=request, future=future, serial=self._serial, version=version)
        self._waiting[version][ticket.serial] = ticket
        self._sessions[request.session] = (version, now_s)
        self._sessions.move_to_end(request.session)
        self.has_news = True
        return ticket

    def abandon(self, ticket: Ticket) -> None:
        """Nobody waits for this request any more: out of the line at once, or out of its batch before the next step."""
        if ticket.slot is not None:
            self._gone[ticket.serial] = ticket
            self.has_news = True
        elif ticket.version in self._waiting:
            self._waiting[ticket.version].pop(ticket.serial, None)

    def release(self, session: str) -> None:
        """The session is over (P19)."""
        self._sessions.pop(session, None)
        self.table.release(session)
        self.has_news = True

    def prepare(self) -> bool:
        """Before a step: take abandoned requests out and let waiting ones in. False when there is nothing to run."""
        self.has_news = False
        if self._gone:
            for version, batch in self.batches.items():
                leaving = [t for t in self._gone.values() if t.slot is not None and t.version == version]
                if leaving:
                    batch.remove(leaving)
                    self._part(leaving)
            self._gone.clear()
        if self._taken_up:
            self._move_up(max(self._taken_up))
            self._taken_up.clear()
        for version in sorted(self._waiting):
            self._admit(version)
        return any(len(batch) for batch in self.batches.values())

    def settle(self, finished: list[Finished]) -> None:
        """After a step: the rows that ended give their slots back."""
        for row in finished:
            self._part([row.ticket], keep=row.generation is not None)

    def fail_all(self, reason: str) -> None:
        """End every request with EngineDead. The rows stay as they are: a step may still be using them."""
        lines = [line.values() for line in self._waiting.values()]
        for ticket in chain(*lines, *(batch.tickets for batch in self.batches.values())):
            if not ticket.future.done():
                ticket.future.set_exception(EngineDead(reason))
        for line in self._waiting.values():
            line.clear()
        self.has_news = True

    def _move_up(self, newest: int) -> None:
        """Requests of older versions that may go on under `newest` do, those that wait in their order of arrival."""
        older = [version for version in self.batches if version < newest]
        line = self._waiting[newest]
        for version in older:
            for ticket in list(self._waiting[version].values()):
                if ticket.request.update_mode is not _STICKY:
                    line[ticket.serial] = self._waiting[version].pop(ticket.serial)
                    self._serve(ticket, newest)
        self._waiting[newest] = OrderedDict(sorted(line.items()))
        for version in older:
            self._move_running(version, newest)

    def _move_running(self, version: int, newest: int) -> None:
        moving = []
        for ticket in self.batches[version].tickets:
            session, slot = ticket.request.session, ticket.slot
            if ticket.request.update_mode is not UpdateMode.INFLIGHT or self.table.is_lent(session, newest):
                continue
            assert slot is not None
            self.table.move(slot, session, version, newest)
            moving.append(ticket)
        if moving:
            self.batches[version].hand_over(moving)
            self.batches[newest].join(moving)
        for ticket in moving:
            self.prefilled_tokens += len(ticket.request.token_ids) + ticket.sampled
            self._serve(ticket, newest)

    def _serve(self, ticket: Ticket, version: int) -> None:
        ticket.version = version
        if held := self._sessions.get(ticket.request.session):
            self._sessions[ticket.request.session] = (version, held[1])

    def _part(self, tickets: list[Ticket], keep: bool = True) -> None:
        for ticket in tickets:
            assert ticket.slot is not None
            self.table.park(ticket.slot, ticket.request.session, ticket.version, keep)
            ticket.slot = None

    def _admit(self, version: int) -> None:
        line, batch = self._waiting[version], self.batches[version]
        joining: list[Ticket] = []
        for ticket in list(line.values()) if line else ():
            if len(batch) + len(joining) >= self._max_batch:  # more, where requests of other versions have moved up
                break
            request = ticket.request
            if self.table.is_lent(request.session, version):
                continue
            if request.update_mode is not _STICKY:
                self.table.forget_others(request.session, version)
            ticket.slot = self.table.lend(request.session, version)
            if ticket.slot is None:
                break
            del line[ticket.serial]
            reused = self.table.fill(ticket.slot, request.token_ids)
            self.reused_tokens += reused
            self.prefilled_tokens += len(request.token_ids) - reused
            joining.append(ticket)
        if joining:
            batch.join(joining)
