"""What the Lua files reply, as tuples and records: the other half of what they document at their tops.

Owns no connection and no state. Lists of groups come packed with msgpack; everything else as the protocol has it.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from headrace.platform.ledger.checks import IN_FLIGHT, TRAINED
from headrace.platform.ledger.policy import NO_VERSION
from headrace.platform.records.delivery import LedgerStats


class Ticket(NamedTuple):
    """One ticket in the reply of lua/admit.lua; the fields of `GroupTicket`."""

    group: int
    position: int
    size: int
    version: int
    dispatched_s: float
    deadline_s: float
    attempts: tuple[tuple[int, int], ...]


class StoredSlot(msgspec.Struct, gc=False):
    """What a reader needs of a slot of lua/groups.lua; `bytes` of its payload, 0 for none."""

    attempt: int
    state: str
    hash: str = ""
    file: str = ""
    score: float = 0.0
    oldest: int = 0
    newest: int = 0
    bytes: int = 0

    @property
    def is_done(self) -> bool:
        """It holds an episode."""
        return self.state == "done"


class StoredGroup(msgspec.Struct, gc=False):
    """What a reader needs of a group of lua/groups.lua."""

    number: int
    position: int
    size: int
    version: int
    deliveries: int
    dispatched: float
    slots: list[StoredSlot]

    def payload_keys(self) -> list[str]:
        """The keys of the payloads that there are, without the run's prefix."""
        return [payload_key(self.number, i, slot.hash) for i, slot in enumerate(self.slots) if slot.bytes]


def payload_key(group: int, sample: int, payload_hash: str) -> str:
    """Where a payload is, without the run's prefix; as in lua/groups.lua. Its hash is in it, so that a put that is
    refused has not written over one that was accepted."""
    return f"p:{group}:{sample}:{payload_hash}"


pack = msgspec.msgpack.Encoder().encode
read_tickets = msgspec.msgpack.Decoder(list[Ticket]).decode
read_group = msgspec.msgpack.Decoder(StoredGroup).decode


def rows(flat: Sequence[Any], width: int) -> Iterator[tuple[Any, ...]]:
    """A flat list as rows of `width` values."""
    return zip(*[iter(flat)] * width, strict=True)


def read_stats(reply: Sequence[Any]) -> LedgerStats:
    """The reply of lua/stats.lua."""
    counts, batches, opened, ready, leased, consumed, waiting, restarts, now, flat = reply
    meta = {name.decode(): value.decode() for name, value in rows(flat, 2) if name != b"limits"}
    by_kind = _by_kind(rows(counts, 2))
    head, learner = _int(meta, "head", NO_VERSION), meta.get("holder", "")
    return LedgerStats(
        dispatched=_int(meta, "dispatched"),
        fates={TRAINED: 0, IN_FLIGHT: 0} | _ints(by_kind["fate"]),
        refused=_ints(by_kind["refused"]),
        head=None if head == NO_VERSION else head,
        head_batches=batches,
        fence=_int(meta, "fence"),
        dispatch_sequence=_int(meta, "sequence"),
        groups_open=opened,
        groups_ready=ready,
        groups_leased=leased,
        groups_consumed=consumed,
        zero_variance_since_commit=_int(meta, "zero_variance"),
        score_sum=float(meta.get("score_sum", 0)),
        score_count=_int(meta, "score_count"),
        payload_bytes=_int(meta, "payload_bytes"),
        revision=_int(meta, "revision"),
        stopped="stop_reason" in meta,
        lags={int(lag): count for lag, count in _ints(by_kind["lag"]).items()},
        slot_seconds={fate: seconds for fate, seconds in by_kind["seconds"].items() if seconds},
        lengths=_lengths(by_kind["length"]),
        restarts_waiting=restarts,
        protection_lost=_int(meta, "protection_lost"),
        groups_waiting=waiting,
        learner=learner,
        learner_silent_s=max(float(now) - float(meta["learner_seen"]), 0.0) if learner else 0.0,
        epoch=_int(meta, "epoch"),
        suspect=_int(meta, "suspect") == 1,
    )


def _int(meta: Mapping[str, str], field: str, otherwise: int = 0) -> int:
    return int(meta.get(field, otherwise))


def _by_kind(rows: Iterable[tuple[bytes, bytes]]) -> dict[str, dict[str, float]]:
    """The counts of `{run}:counts`, by what stands before the first colon of their names."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for name, value in rows:
        kind, _, rest = name.decode().partition(":")
        found[kind][rest] = float(value)
    return found


def _ints(counts: Mapping[str, float]) -> dict[str, int]:
    return {name: int(count) for name, count in counts.items() if count}


def _lengths(counts: Mapping[str, float]) -> dict[str, dict[int, int]]:
    lengths: dict[str, dict[int, int]] = defaultdict(dict)
    for name, count in _ints(counts).items():
        kind, _, bucket = name.partition(":")
        lengths[kind][int(bucket)] = count
    return dict(lengths)
