"""The ledger on a Redis-protocol server: Valkey 9 or Redis 7, over a unix socket or TCP.

Every transition is one Lua file in `lua/` (P4) on server time (P12); here arguments are flattened and replies read.
The rules are those of `MemoryLedger`; the conformance suite and the model test hold the two together.
"""

import asyncio
from collections.abc import Sequence
from itertools import chain as chained
from typing import Any

import msgspec

from headrace.platform.errors import ConfigError
from headrace.platform.ledger.checks import (
    check_admission,
    check_chain,
    check_drop_reason,
    check_holder,
    check_page,
    check_submissions,
    ending_fate,
    fates_by_group,
)
from headrace.platform.ledger.fate_log import fate_row
from headrace.platform.ledger.policy import NO_VERSION
from headrace.platform.ledger.redis_link import RedisLink
from headrace.platform.ledger.redis_replies import (
    StoredSlot,
    pack,
    payload_key,
    read_group,
    read_stats,
    read_tickets,
    rows,
)
from headrace.platform.records.delivery import (
    Admission,
    AtRisk,
    CancelNotice,
    Chain,
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

SCHEMA_VERSION = 3
"""Of the keys that the scripts write; connections of another schema are refused."""
_WATCH_SLICE_S = 1.0
"""Longest blocking read of `watch_head`: well below the deadline of a call."""
_PAYLOADS_PER_READ = 64
"""One reply of some megabytes at most."""


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
            LedgerAway: no server.
            LedgerError: a wrong password, or a server that may evict keys.
            DeadlineExceeded: something listens but does not answer.
        """
        link = await RedisLink.connect(url, run, deadline_s=connect_deadline_s)
        try:
            wanted = {"schema_version": SCHEMA_VERSION} | msgspec.structs.asdict(limits)
            pairs = ((name, format(float(value), ".17g")) for name, value in wanted.items())
            differing = [text.decode() for text in await link.open([*chained.from_iterable(pairs)])]
            if differing:
                raise ConfigError(_mismatch(run, differing))
        except BaseException:
            await link.close()
            raise
        return cls(link, run, limits)

    @property
    def warnings(self) -> Sequence[str]:
        """What the user should know of the server."""
        return self._link.warnings

    # --- workers ------------------------------------------------------------------------------------------------------

    async def admit(self, version: int, size: int, groups: int, holder: str) -> Admission:
        """See `Ledger.admit`."""
        check_admission(self._limits, size)
        check_holder(holder)
        refusal, packed = await self._link.transition("admit", version, size, groups, holder)
        tickets = tuple(GroupTicket(**ticket._asdict()) for ticket in read_tickets(packed))
        return Admission(tickets, Refusal(refusal.decode()))

    async def renew(self, holder: str, groups: Sequence[int]) -> Sequence[CancelNotice]:
        """See `Ledger.renew`."""
        check_holder(holder)
        flat = await self._link.transition("renew", holder, *groups)
        return [CancelNotice(int(group), CancelReason(reason.decode())) for group, reason in rows(flat, 2)]

    async def disown(self, holder: str) -> None:
        """See `Ledger.disown`."""
        check_holder(holder)
        await self._link.transition("disown", holder)

    async def put(self, submissions: Sequence[Submission]) -> Sequence[PutReply]:
        """See `Ledger.put`."""
        check_submissions(self._run, submissions)
        packed = pack([_as_map(submission) for submission in submissions])
        payloads = {
            payload_key(submission.attempt_id.group, submission.attempt_id.sample, submission.payload_hash): payload
            for submission in submissions
            if (payload := _payload(submission))
        }
        flat = await self._link.transition_with(payloads, "put", packed)
        return [PutReply(Verdict(verdict.decode()), attempt) for verdict, attempt in rows(flat, 2)]

    async def allow(self, environment: str, versions: Sequence[str]) -> None:
        """See `Ledger.allow`."""
        await self._link.transition("allow", environment, *versions)

    # --- the learner --------------------------------------------------------------------------------------------------

    async def acquire_learner(self, holder: str, takeover: bool = False) -> int:
        """See `Ledger.acquire_learner`."""
        check_holder(holder)
        return int((await self._link.transition("acquire", holder, int(takeover)))[0])

    async def lease(self, fence: int, parent: int, ahead: int, count: int) -> Sequence[LeasedGroup]:
        """See `Ledger.lease`. Raises LedgerError when `parent` was never committed."""
        flat = await self._link.transition("lease", fence, parent, ahead, count)
        leased = [(read_group(packed), lag) for packed, lag in rows(flat, 2)]
        payloads = await self._payloads([key for group, _ in leased for key in group.payload_keys()])
        return [
            LeasedGroup(
                group=group.number,
                position=group.position,
                size=group.size,
                version=group.version,
                lag=lag,
                deliveries=group.deliveries,
                dispatched_s=group.dispatched,
                members=tuple(
                    self._member(group.number, sample, slot, payloads)
                    for sample, slot in enumerate(group.slots)
                    if slot.is_done
                ),
            )
            for group, lag in leased
        ]

    async def _payloads(self, keys: Sequence[str]) -> dict[str, bytes]:
        """The payloads of leased slots. They do not change while the lease lasts; one that is gone is in its file."""
        found: list[bytes | None] = []
        for first in range(0, len(keys), _PAYLOADS_PER_READ):
            page = (self._link.prefix + key for key in keys[first:][:_PAYLOADS_PER_READ])
            found += await self._link.read("payloads", "MGET", *page)
        return {key: payload for key, payload in zip(keys, found, strict=True) if payload is not None}

    def _member(self, group: int, sample: int, slot: StoredSlot, payloads: dict[str, bytes]) -> LeasedMember:
        return LeasedMember(
            attempt_id=AttemptId(self._run, group, sample, slot.attempt),
            payload=payloads.get(payload_key(group, sample, slot.hash), b""),
            payload_hash=slot.hash,
            store_file=slot.file,
            score=slot.score,
            oldest_version=slot.oldest,
            newest_version=slot.newest,
        )

    async def at_risk(self, fence: int, parent: int, ahead: int, count: int) -> AtRisk:
        """See `Ledger.at_risk`. Raises LedgerError when `parent` was never committed."""
        playing, ready, protected = await self._link.transition("at_risk", fence, parent, ahead, count)
        return AtRisk(playing=playing, ready=ready, protected=protected)

    async def extend(self, fence: int, groups: Sequence[int], exactly: bool = False) -> None:
        """See `Ledger.extend`. Raises LedgerError, changing nothing, when one of `groups` is no longer leased."""
        await self._link.transition("extend", fence, int(exactly), *groups)

    async def release(self, fence: int, groups: Sequence[int]) -> None:
        """See `Ledger.release`. Groups that are no longer leased are passed over."""
        await self._link.transition("release", fence, *groups)

    async def drop(self, fence: int, groups: Sequence[int], reason: str) -> None:
        """See `Ledger.drop`. Raises LedgerError, changing nothing, for an unknown reason or a group not leased."""
        await self._link.transition("drop", fence, check_drop_reason(reason), *groups)

    async def stage(self, fence: int, floor: int = 0) -> int:
        """See `Ledger.stage`."""
        return int((await self._link.transition("stage", fence, floor))[0])

    async def commit(self, request: CommitRequest) -> None:
        """See `Ledger.commit`."""
        fates = fates_by_group(self._run, request)
        await self._link.transition(
            "commit",
            request.fence,
            request.number,
            request.parent,
            request.content_hash,
            request.batches,
            pack(list(fates.items())),
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
            (number,) = await self._link.transition("head")
            head = None if number == NO_VERSION else int(number)
            left_s = end_s - loop.time()
            if head != after or left_s <= 0:
                return head
            position = newest[0][0] if newest else "0-0"
            wait_ms = max(int(min(left_s, _WATCH_SLICE_S) * 1000), 1)
            await self._link.command("watch", client.xread({stream: position}, count=1, block=wait_ms))

    async def stop(self, reason: str) -> None:
        """See `Ledger.stop`."""
        await self._link.transition("stop", reason or CancelReason.STOPPED)

    async def confirm(self, newest: int, content_hash: str) -> bool:
        """See `Ledger.confirm`."""
        await self._link.look_again()
        return bool((await self._link.transition("confirm", newest, content_hash))[0])

    async def reconcile(self, chain: Chain) -> None:
        """See `Ledger.reconcile`."""
        check_chain(chain)
        await self._link.look_again()
        await self._link.transition("reconcile", pack(chain))

    async def durable(self, timeout_s: float) -> bool:
        """See `Ledger.durable`."""
        return await self._link.durable(timeout_s)

    async def stats(self) -> LedgerStats:
        """See `Ledger.stats`."""
        return read_stats(await self._link.transition("stats"))

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
        key, client = f"{self._link.prefix}meta", self._link.client
        change: Any = client.hdel(key, "clock") if now_s is None else client.hset(key, "clock", repr(now_s))
        await self._link.command("clock", change)

    async def close(self) -> None:
        """Release connections."""
        await self._link.close()


def _as_map(submission: Submission) -> dict[str, str | int | float]:
    """One of the packed list of lua/put.lua."""
    attempt_id, done = submission.attempt_id, submission.outcome is Outcome.DONE
    return {
        "group": attempt_id.group,
        "sample": attempt_id.sample,
        "attempt": attempt_id.attempt,
        "outcome": submission.outcome.value,
        "fate": "" if done else ending_fate(submission),
        "retryable": submission.retryable,
        "hash": submission.payload_hash,
        "file": submission.store_file,
        "score": float(submission.score),
        "oldest": submission.oldest_version,
        "newest": submission.newest_version,
        "environment": submission.environment,
        "bytes": len(_payload(submission)),
    }


def _payload(submission: Submission) -> bytes:
    """What the ledger keeps of it: only a finished episode has something to deliver."""
    return submission.payload if submission.outcome is Outcome.DONE else b""


def _mismatch(run: str, differing: Sequence[str]) -> str:
    texts = ", ".join(f"{name} is {found} there and {wanted} here" for name, found, wanted in rows(differing, 3))
    return f"run {run} has other queue limits: {texts}. Connect with its limits, or start another run."
