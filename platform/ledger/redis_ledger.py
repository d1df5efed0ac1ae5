"""The ledger on a Redis-protocol server: Valkey 9 or Redis 7, over a unix socket or TCP.

Every transition is one Lua file in `lua/` (P4) on server time (P12); here arguments are flattened and replies read.
The rules are those of `MemoryLedger`; the conformance suite and the model test hold the two together.
"""

import asyncio
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import msgspec

from headrace.platform.errors import ConfigError
from headrace.platform.ledger.checks import (
    IN_FLIGHT,
    TRAINED,
    check_admission,
    check_drop_reason,
    check_page,
    check_submissions,
    ending_fate,
    fates_by_group,
)
from headrace.platform.ledger.fate_log import fate_row
from headrace.platform.ledger.policy import NO_VERSION
from headrace.platform.ledger.redis_link import RedisLink
from headrace.platform.records.delivery import (
    Admission,
    CancelNotice,
    CommitRequest,
    GroupTicket,
    LeasedGroup,
    LeasedMember,
    LedgerLimits,
    LedgerStats,
    Outcome,
    PutReply,
    Refusal,
    Submission,
    Verdict,
)
from headrace.platform.records.ids import AttemptId
from headrace.platform.records.status import CancelReason
from headrace.platform.records.tables import FateRow

SCHEMA_VERSION = 2
"""Of the keys that the scripts write; connections of another schema are refused."""
_WATCH_SLICE_S = 1.0
"""Longest blocking read of `watch_head`: well below the deadline of a call."""


class RedisLedger:
    """`Ledger` on a server. Make one with `connect`; connections are shared by all calls of one event loop."""

    def __init__(self, link: RedisLink, run: str, limits: LedgerLimits) -> None:
        self._link = link
        self._run = run
        self._limits = limits

    @classmethod
    async def connect(
        cls, url: str, run: str, limits: LedgerLimits, *, connect_deadline_s: float = 10.0
    ) -> "RedisLedger":
        """Connect to `run`. The first connection writes its limits, later ones must bring the same.

        Raises:
            ConfigError: the run has other limits, or keys of another schema.
            LedgerError: no server, a wrong password, or a server that may evict keys.
            DeadlineExceeded: something listens but does not answer.
        """
        link = await RedisLink.connect(url, run, deadline_s=connect_deadline_s)
        try:
            wanted = {"schema_version": SCHEMA_VERSION} | msgspec.structs.asdict(limits)
            pairs = ((name, format(float(value), ".17g")) for name, value in wanted.items())
            differing = [text.decode() for text in await link.transition("open", *chain.from_iterable(pairs))]
            if differing:
                raise ConfigError(_mismatch(run, differing))
        except BaseException:
            await link.close()
            raise
        return cls(link, run, limits)

    # --- workers ------------------------------------------------------------------------------------------------------

    async def admit(self, version: int, size: int, groups: int) -> Admission:
        """See `Ledger.admit`."""
        check_admission(self._limits, size)
        refusal, *flat = await self._link.transition("admit", version, size, groups)
        tickets = tuple(
            GroupTicket(
                group=int(group),
                size=size,
                version=version,
                dispatched_s=float(dispatched_s),
                deadline_s=float(deadline_s),
            )
            for group, dispatched_s, deadline_s in _rows(flat, 3)
        )
        return Admission(tickets, Refusal(refusal.decode()))

    async def put(self, submissions: Sequence[Submission]) -> Sequence[PutReply]:
        """See `Ledger.put`."""
        check_submissions(self._run, submissions)
        flat = await self._link.transition("put", *chain.from_iterable(map(_flat_submission, submissions)))
        return [PutReply(Verdict(verdict.decode()), attempt) for verdict, attempt in _rows(flat, 2)]

    async def cancelled(self, groups: Sequence[int]) -> Sequence[CancelNotice]:
        """See `Ledger.cancelled`."""
        flat = await self._link.transition("cancelled", *groups)
        return [CancelNotice(int(group), CancelReason(reason.decode())) for group, reason in _rows(flat, 2)]

    # --- the learner --------------------------------------------------------------------------------------------------

    async def acquire_learner(self, holder: str) -> int:
        """See `Ledger.acquire_learner`."""
        return int((await self._link.transition("acquire", holder))[0])

    async def lease(self, fence: int, parent: int, ahead: int, count: int) -> Sequence[LeasedGroup]:
        """See `Ledger.lease`."""
        flat = await self._link.transition("lease", fence, parent, ahead, count)
        return [
            LeasedGroup(
                group=int(group),
                version=int(version),
                lag=lag,
                deliveries=deliveries,
                dispatched_s=float(dispatched_s),
                members=tuple(self._member(int(group), *row) for row in _rows(members, 6)),
            )
            for group, version, lag, deliveries, dispatched_s, members in _rows(flat, 6)
        ]

    def _member(
        self, group: int, sample: int, attempt: bytes, payload: bytes, store_file: bytes, score: bytes, oldest: bytes
    ) -> LeasedMember:
        return LeasedMember(
            attempt_id=AttemptId(self._run, group, sample, int(attempt)),
            payload=payload,
            store_file=store_file.decode(),
            score=float(score),
            oldest_version=int(oldest),
        )

    async def extend(self, fence: int, groups: Sequence[int]) -> None:
        """See `Ledger.extend`. Raises LedgerError, changing nothing, when one of `groups` is no longer leased."""
        await self._link.transition("extend", fence, *groups)

    async def release(self, fence: int, groups: Sequence[int]) -> None:
        """See `Ledger.release`. Groups that are no longer leased are passed over."""
        await self._link.transition("release", fence, *groups)

    async def drop(self, fence: int, groups: Sequence[int], reason: str) -> None:
        """See `Ledger.drop`. Raises LedgerError, changing nothing, for an unknown reason or a group not leased."""
        await self._link.transition("drop", fence, check_drop_reason(reason), *groups)

    async def stage(self, fence: int) -> int:
        """See `Ledger.stage`."""
        return int((await self._link.transition("stage", fence))[0])

    async def commit(self, request: CommitRequest) -> None:
        """See `Ledger.commit`."""
        named = fates_by_group(self._run, request)
        rows: Iterator[tuple[int | str, ...]] = ((group, *fate) for group, fates in named.items() for fate in fates)
        await self._link.transition(
            "commit",
            request.fence,
            request.number,
            request.parent,
            request.content_hash,
            request.batches,
            *chain.from_iterable(rows),
        )

    async def settle(self, fence: int, version: int) -> None:
        """See `Ledger.settle`."""
        await self._link.transition("settle", fence, version)

    async def rollback(self, fence: int, version: int) -> None:
        """See `Ledger.rollback`. A rollback is a resume: a stopped run admits again."""
        await self._link.transition("rollback", fence, version)

    # --- everybody ----------------------------------------------------------------------------------------------------

    async def watch_head(self, after: int | None, timeout_s: float) -> int | None:
        """See `Ledger.watch_head`. Blocks on a small stream that every move of the head writes to."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        stream, client = f"{self._link.prefix}heads", self._link.client
        while True:
            # The position is read before the head, so that a move between the two ends the blocking read at once.
            newest: Any = await self._link.command("watch", client.xrevrange(stream, count=1))
            head = await self._head()
            left_s = end_s - loop.time()
            if head != after or left_s <= 0:
                return head
            position = newest[0][0] if newest else "0-0"
            wait_ms = max(int(min(left_s, _WATCH_SLICE_S) * 1000), 1)
            await self._link.command("watch", client.xread({stream: position}, count=1, block=wait_ms))

    async def _head(self) -> int | None:
        head: Any = await self._link.command("head", self._link.client.hget(f"{self._link.prefix}meta", "head"))
        return None if head is None else int(head)

    async def stop(self, reason: str) -> None:
        """See `Ledger.stop`."""
        await self._link.transition("stop", reason or CancelReason.STOPPED)

    async def stats(self) -> LedgerStats:
        """See `Ledger.stats`."""
        fates, refused, head, batches, opened, ready, leased, consumed, stopped, counts = await self._link.transition(
            "stats"
        )
        fence, sequence, dispatched, zero_variance, score_sum, score_count, payload_bytes, revision = (
            value or b"0" for value in counts
        )
        return LedgerStats(
            dispatched=int(dispatched),
            fates={TRAINED: 0, IN_FLIGHT: 0} | {name: count for name, count in _counts(fates).items() if count},
            refused=_counts(refused),
            head=None if head == NO_VERSION else head,
            head_batches=batches,
            fence=int(fence),
            dispatch_sequence=int(sequence),
            groups_open=opened,
            groups_ready=ready,
            groups_leased=leased,
            groups_consumed=consumed,
            zero_variance_since_commit=int(zero_variance),
            score_sum=float(score_sum),
            score_count=int(score_count),
            payload_bytes=int(payload_bytes),
            revision=int(revision),
            stopped=bool(stopped),
        )

    async def fates(self, after: int, limit: int) -> tuple[Sequence[FateRow], int]:
        """See `Ledger.fates`."""
        check_page(limit)
        position, *lines = await self._link.transition("fates", after, limit)
        return [self._fate(*line.decode().split(" ")) for line in lines], position

    def _fate(self, group: str, sample: str, attempt: str, fate: str, version: str = "") -> FateRow:
        attempt_id = AttemptId(self._run, int(group), int(sample), int(attempt))
        return fate_row(attempt_id, fate, int(version) if version else None)

    async def set_clock(self, now_s: float | None) -> None:
        """For tests and simulations: the run's scripts take `now_s` for the server's time; None ends that."""
        key, client = f"{self._link.prefix}clock", self._link.client
        await self._link.command("clock", client.delete(key) if now_s is None else client.set(key, repr(now_s)))

    async def close(self) -> None:
        """Release connections."""
        await self._link.close()


def _rows(flat: Sequence[Any], width: int) -> Iterator[tuple[Any, ...]]:
    return zip(*[iter(flat)] * width, strict=True)


def _counts(flat: Sequence[bytes]) -> dict[str, int]:
    return {name.decode(): int(count) for name, count in _rows(flat, 2)}


def _flat_submission(submission: Submission) -> tuple[str | bytes | int, ...]:
    """The eleven arguments of lua/put.lua."""
    attempt_id, done = submission.attempt_id, submission.outcome is Outcome.DONE
    return (
        attempt_id.group,
        attempt_id.sample,
        attempt_id.attempt,
        submission.outcome,
        "" if done else ending_fate(submission),
        int(submission.retryable),
        submission.payload_hash,
        submission.payload,
        submission.store_file,
        repr(float(submission.score)),
        submission.oldest_version,
    )


def _mismatch(run: str, differing: Sequence[str]) -> str:
    texts = ", ".join(f"{name} is {found} there and {wanted} here" for name, found, wanted in _rows(differing, 3))
    return f"run {run} has other queue limits: {texts}. Connect with its limits, or start another run."
