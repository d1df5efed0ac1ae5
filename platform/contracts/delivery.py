"""Queue, head and versions: who delivers what to whom, exactly once (docs/protocol.md)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from headrace.platform.records.delivery import (
    Admission,
    AtRisk,
    CancelNotice,
    Chain,
    CommitRequest,
    LeasedGroup,
    LedgerStats,
    PutReply,
    Submission,
)
from headrace.platform.records.tables import FateRow
from headrace.platform.records.versions import VersionManifest

Clock = Callable[[], float]
"""Reads a time in seconds. Decisions are given one; they never look at the wall."""


class Ledger(Protocol):
    """Queue and head in one place: every method is one atomic step (P4), and time is the server's (P12).

    Any method raises LedgerAway when the server cannot be reached, and LedgerRewound (P8) when it must be reconciled
    first; `stats`, `confirm` and `reconcile` are answered nevertheless.
    """

    async def admit(self, version: int, size: int, groups: int, holder: str) -> Admission:
        """Reserve room for up to `groups` groups of `size` that will be played with `version` (P19, P20).

        Groups whose worker is gone come first, with the version that they are pinned to (P18), then groups that were
        lost to lag (P16), then new ones. `holder` has their dispatch lease (P2) for as long as it renews it.
        """

    async def renew(self, holder: str, groups: Sequence[int]) -> Sequence[CancelNotice]:
        """Renew the dispatch leases of running groups; which of them should be abandoned, and why."""

    async def disown(self, holder: str) -> None:
        """`holder` is known to be gone: its dispatch leases end now instead of when they run out."""

    async def put(self, submissions: Sequence[Submission]) -> Sequence[PutReply]:
        """End attempts. Never blocks for an admitted one; the same as one call each (case Q15)."""

    async def lease(self, fence: int, parent: int, ahead: int, count: int) -> Sequence[LeasedGroup]:
        """`count` ready groups, oldest first, or none at all (P20). Evicts what is over the lag limit against
        `parent` plus `ahead` unpublished batches, or too old (P17). Raises Fenced."""

    async def at_risk(self, fence: int, parent: int, ahead: int, count: int) -> AtRisk:
        """What would be over the lag limit after the batch that `lease` with these arguments gives. Raises Fenced."""

    async def extend(self, fence: int, groups: Sequence[int], exactly: bool = False) -> None:
        """Renew the leases; with `exactly`, other leased groups come back to the queue: a lost reply had granted
        them. Raises Fenced."""

    async def release(self, fence: int, groups: Sequence[int]) -> None:
        """Give leased groups back to the queue. Raises Fenced."""

    async def drop(self, fence: int, groups: Sequence[int], reason: str) -> None:
        """Drop leased groups for a reason that the learner found. Raises Fenced."""

    async def acquire_learner(self, holder: str, takeover: bool = False) -> int:
        """Become the learner: a new fence, and every lease of the old one is released.

        Raises:
            Fenced: another holder was heard of within `learner_term_s`; `takeover` is for whoever knows that it is
                gone.
        """

    async def stage(self, fence: int, floor: int = 0) -> int:
        """Reserve a version number, never used before and at least `floor` (P6). Raises Fenced."""

    async def commit(self, request: CommitRequest) -> None:
        """Publish (P5, P7); the first version has parent -1. The same commit again is fine.

        Raises:
            Fenced: another learner holds the run, or it was stopped.
            CommitRefused: a precondition of P7 does not hold.
        """

    async def settle(self, fence: int, version: int) -> None:
        """A complete checkpoint of `version` exists: consumption by its ancestors is final (P5)."""

    async def rollback(self, fence: int, version: int) -> None:
        """Make the settled `version` the head again; what later versions consumed comes again (P6)."""

    async def watch_head(self, after: int | None, timeout_s: float) -> int | None:
        """Wait until the committed head is not `after`; returns the head then, or at the end of the time."""

    async def stop(self, reason: str) -> None:
        """Close the books for good: admit nothing more, and leave nothing in flight.

        What is open is cancelled; what is ready or leased is dropped; what was consumed stays. The run is taken from
        its learner: whatever it still tries raises Fenced. Only `acquire_learner` and `rollback` go on from here.
        """

    async def allow(self, environment: str, versions: Sequence[str]) -> None:
        """From now on, episodes of `environment` may come from these versions of it (P17); from any before the first
        call. Others are dropped(environment), and a group never mixes versions."""

    async def confirm(self, newest: int, content_hash: str) -> bool:
        """After a restart of the server: whether it has lost nothing, as far as this client can tell. Then it is
        trusted again, and every lease has a fresh term (P12). `newest` is the newest version of the manifest chain
        (-1: none)."""

    async def reconcile(self, chain: Chain) -> None:
        """Take in what the manifest chain says (P8), in a new epoch: every fence is void, versions and consumption
        that were lost are known again, and attempts that nobody can account for have failed(infrastructure).

        Raises:
            LedgerError: a later epoch was reconciled already.
        """

    async def durable(self, timeout_s: float) -> bool:
        """Wait until all that this client was answered before is on the server's disk (P11); False when that cannot
        be known in time, or at all."""

    async def stats(self) -> LedgerStats:
        """Counts, from one atomic step."""

    async def fates(self, after: int, limit: int) -> tuple[Sequence[FateRow], int]:
        """Fates decided after position `after`, oldest first, at most `limit`, and the position of the last one
        (`after` when there is none); forgets what lies at or before `after`. The first position is 1.

        An attempt that ends gets its row in the same step (P3); one that a rollback queues again gets an IN_FLIGHT
        row. What nobody reads is bounded: the oldest rows go, and the positions show the gap.

        Raises:
            LedgerError: `limit` is below 1, or `after` lies past the end.
        """

    async def close(self) -> None:
        """Release connections."""


class VersionRegistry(Protocol):
    """Blobs, pins and watching. A version exists when its manifest does (P8)."""

    async def stage(self, number: int, fence: int, files: Mapping[str, bytes]) -> tuple[str, dict[str, str], str]:
        """Write a version's files under a path that contains the fence; returns path, hash by file, content hash."""

    async def manifest(self, manifest: VersionManifest) -> None:
        """Create the manifest, exclusively and last. Raises RegistryError when the number is taken by another."""

    async def open(self, version: int) -> tuple[VersionManifest, str]:
        """The manifest and a local folder whose files match its hashes. Raises RegistryError, NotFound."""

    async def latest(self) -> VersionManifest | None:
        """The newest manifest."""

    async def manifests(self, after: int = -1) -> Sequence[VersionManifest]:
        """Every manifest with a number above `after` that can be read, in order of their numbers."""

    async def highest_number(self) -> int:
        """The highest number of any manifest or staged blob, committed or not (P6); -1 when there are none."""

    async def claim_epoch(self) -> int:
        """A number that nobody ever claimed before, above all others; durable on return."""

    async def watch(self, after: int, timeout_s: float) -> VersionManifest | None:
        """Wait for a *committed* version above `after`; None when the time is over."""

    async def pin(self, version: int, holder: str, ttl_s: float) -> None:
        """Keep a version from being removed. Raises NotFound when it is already gone."""

    async def unpin(self, version: int, holder: str) -> None:
        """Give a pin back; safe when there is none."""

    async def retain(self, keep: Sequence[int], newest: int) -> Sequence[int]:
        """Remove versions that are not among `keep`, the `newest` ones, or pinned; returns those removed."""
