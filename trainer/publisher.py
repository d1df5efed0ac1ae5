"""Publishing and settling: the order of writes that makes a version exist (P5, P7, P8).

stage (number and blobs) ─► manifest, exclusive ─► ledger commit ─► ... ─► checkpoint, complete ─► settle ─► retain

A crash between any two leaves something that readers pass over: blobs without a manifest, a manifest that was never
committed, parts without a checkpoint manifest. A number that any of them bears is never used again (P6). A write that
finds the disk full is made once more, when everything has gone that the run can do without (P23). Owns the head and
the lineage as this learner sees them; computes nothing.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from headrace.platform.contracts import Clock, Ledger, VersionRegistry
from headrace.platform.errors import CommitRefused, DiskFull, RunFailed
from headrace.platform.ledger.policy import NO_VERSION, VersionNode
from headrace.platform.records.delivery import CommitRequest, LedgerStats
from headrace.platform.records.versions import ADAPTER, ADAPTER_CONFIG_FILE, FULL, VersionManifest, VersionRef
from headrace.platform.testing.failpoints import failpoint
from headrace.trainer.checkpoint import CheckpointState, CheckpointStore
from headrace.trainer.consumption import Consumption
from headrace.trainer.staleness import TrainStart

T = TypeVar("T")
Compute = Callable[..., Awaitable[Any]]
"""Calls a blocking function, off the event loop or on it."""
Offer = Callable[[str, Mapping[str, bytes]], Awaitable[None]]
_log = logging.getLogger(__name__)
_PAUSES_S = (0.0, 1.0, 1.0)


class _Base(NamedTuple):
    """The newest version with whole weights."""

    number: int
    content_hash: str


class Publisher:
    """See the module. `head` is -1 before the first version; `lineage` has every version that this learner knows.

    Args:
        ledger: the run's queue and head.
        registry: where versions go.
        checkpoints: where complete checkpoints go.
        policy_id: of the versions published.
        keep_versions: newest versions whose weights are kept in any case.
        keep_checkpoints: newest complete checkpoints that are kept.
        world_size: how many ranks the checkpoints are of (P13).
        clock: seconds since the epoch.
        compute: for what blocks.
        offer: is told of a version that is durable and about to be committed: its path in the registry, and its files.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        registry: VersionRegistry,
        checkpoints: CheckpointStore,
        policy_id: str,
        keep_versions: int,
        keep_checkpoints: int,
        world_size: int,
        clock: Clock,
        compute: Compute,
        offer: Offer | None = None,
    ) -> None:
        self._ledger = ledger
        self._registry = registry
        self._checkpoints = checkpoints
        self._policy_id = policy_id
        self._keep_versions = keep_versions
        self._keep_checkpoints = keep_checkpoints
        self._world_size = world_size
        self._clock = clock
        self._compute = compute
        self._offer = offer
        self._head_hash = ""
        self._base: _Base | None = None
        self._settled: list[int] = []
        self._back_to = NO_VERSION  # the checkpoint that the next learner would go back to
        self.kept: frozenset[int] = frozenset()
        """Versions that retention leaves alone because somebody outside asked for it."""
        self.fence = 0
        self.head = NO_VERSION
        self.lineage: dict[int, VersionNode] = {}

    @property
    def batches(self) -> int:
        """B(head) of P14."""
        return self.lineage[self.head].batches if self.head in self.lineage else 0

    def train_start(self, ahead: int) -> TrainStart:
        """The weights that are `ahead` unpublished batches past the head (P14)."""
        return TrainStart(lineage=self.lineage, parent=self.head, ahead=ahead)

    async def take_over(self, holder: str, takeover: bool) -> None:
        """Become the learner. Raises Fenced while another one is alive, unless `takeover` says that it is not."""
        self.fence = await self._ledger.acquire_learner(holder, takeover)

    async def resume(self) -> tuple[CheckpointState, dict[str, bytes]] | None:
        """Go back to the newest complete checkpoint (P6, case Q16); what later versions consumed comes again.

        A checkpoint off the head's lineage does not count: a learner that was fenced off may have finished writing it.

        Returns:
            Its state and files, or None for a run that begins: one without a head, or one that died before the
            checkpoint of its first version and has trained nothing since.

        Raises:
            RunFailed: there is no checkpoint to go back to, its ranks are not those of today, or the ledger has never
                heard of it.
        """
        stats = await self._ledger.stats()
        self._settled = await self._compute(self._checkpoints.complete)
        if stats.head is None:
            if self._settled:
                raise RunFailed(
                    f"there is a checkpoint of version {self._settled[-1]} and the ledger knows no version at all: it"
                    " must be reconciled with the run root first (P8)"
                )
            return None
        manifests = {manifest.ref.number: manifest for manifest in await self._registry.manifests()}
        self.lineage = _lineage(manifests.values())
        among = _ancestors(manifests, stats.head)
        found: tuple[CheckpointState, dict[str, bytes]] | None
        found = await self._compute(self._checkpoints.latest_complete, among)
        if found is None:
            await self._begin_again(stats, manifests.get(stats.head))
            return None
        state = found[0]
        if state.world_size != self._world_size:
            # P13: the shards of another number of ranks are not these ranks' shards.
            raise RunFailed(
                f"the checkpoint of version {state.version} is of {state.world_size} learner ranks and this learner"
                f" has {self._world_size}; resume with {state.world_size}"
            )
        # The last learner may have died between writing the checkpoint and settling it.
        await self._ledger.settle(self.fence, state.version)
        await self._ledger.rollback(self.fence, state.version)
        self.lineage.setdefault(state.version, VersionNode(NO_VERSION, state.batches))
        self.head, self._head_hash = state.version, state.content_hash
        self._base = _base_of(manifests, state.version)
        self._back_to = state.version
        return found

    async def _begin_again(self, stats: LedgerStats, head: VersionManifest | None) -> None:
        """The first version was published and never settled: the initial weights get a number again (P6), over it."""
        if stats.head_batches > 0:
            raise RunFailed("the run has trained and there is no complete checkpoint; it cannot be resumed")
        if head is None:
            raise RunFailed(f"version {stats.head} is the head and its manifest cannot be read; it cannot be resumed")
        await self._ledger.rollback(self.fence, head.ref.number)  # a run that was stopped meanwhile admits again
        self.head, self._head_hash = head.ref.number, head.content_hash

    async def reserve(self) -> int:
        """A version number, for the next `publish`: above all that ledger, manifests and blobs bear (P6).

        Raises Fenced.
        """
        return await self._ledger.stage(self.fence, await self._registry.highest_number() + 1)

    async def publish(self, number: int, files: Mapping[str, bytes], *, batches: int, consumed: Consumption) -> None:
        """Make version `number`, `batches` learner batches after the head, the new head.

        Raises:
            Fenced: another learner holds the run.
            CommitRefused: the ledger refused the commit; no later one of this learner could be accepted.
            DiskFull: there is no room for it.
        """
        path, hashes, content_hash = await self.durably(lambda: self._registry.stage(number, self.fence, files))
        failpoint("after_blob")
        total = self.batches + batches
        kind = ADAPTER if ADAPTER_CONFIG_FILE in files else FULL
        manifest = VersionManifest(
            ref=self._ref(number, kind),
            parent=None if self.head == NO_VERSION else self.head,
            parent_hash=self._head_hash,
            fence=self.fence,
            kind=kind,
            content_hash=content_hash,
            batches=total,
            path=path,
            files=hashes,
            consumed=consumed.fates,
            episode_files=consumed.episode_files,
            groups=consumed.groups,
            created_at_s=self._clock(),
        )
        await self.durably(lambda: self._registry.manifest(manifest))
        failpoint("after_manifest")
        if self._offer is not None:
            await self._offer(path, files)
        request = CommitRequest(
            fence=self.fence,
            number=number,
            parent=self.head,
            content_hash=content_hash,
            batches=batches,
            fates=consumed.fates,
        )
        try:
            await self._ledger.commit(request)
        except CommitRefused as error:
            raise CommitRefused(f"version {number} was not accepted: {error}") from error
        failpoint("after_commit")
        self.lineage[number] = VersionNode(self.head, total)
        self.head, self._head_hash = number, content_hash
        if kind == FULL:
            self._base = _Base(number, content_hash)

    def _ref(self, number: int, kind: str) -> VersionRef:
        """P6: an adapter says over which base it is."""
        if kind == FULL:
            return VersionRef(self._policy_id, number, lineage=self.fence)
        if self._base is None:
            raise RunFailed(f"version {number} would be an adapter, and the version that it is over is not known")
        adapter_id = f"{self._policy_id}-{number}"
        return VersionRef(self._policy_id, number, self.fence, adapter_id, self._base.content_hash)

    async def settle(self, files: Mapping[str, bytes], steps: int) -> None:
        """Write a complete checkpoint of the head; what its ancestors consumed is then final (P5).

        Raises:
            DiskFull: there is no room for it.
        """
        state = CheckpointState(
            version=self.head,
            content_hash=self._head_hash,
            batches=self.batches,
            steps=steps,
            dispatch_sequence=(await self._ledger.stats()).dispatch_sequence,
            world_size=self._world_size,
        )
        await self.durably(lambda: self._compute(self._checkpoints.write, state, files))
        await self._ledger.settle(self.fence, self.head)
        self._back_to = self.head
        await self._compute(self._checkpoints.retain, self._keep_checkpoints)
        self._settled = await self._compute(self._checkpoints.complete)

    async def retain(self) -> None:
        """Remove the weights of versions that are neither new, nor checkpointed, nor kept, nor pinned, nor the base of
        adapters."""
        await self._retain(self._keep_versions)

    async def durably(self, write: Callable[[], Awaitable[T]]) -> T:
        """What `write` returns; see the module for a full disk (P23).

        Raises:
            DiskFull: `write` found no room, twice.
        """
        try:
            return await write()
        except DiskFull as error:
            _log.warning("old checkpoints and versions are removed, as far as nobody needs them: %s", error)
            await self._make_room()
            return await write()

    async def _make_room(self) -> None:
        """Keep the newest checkpoint, the head, what is pinned and what somebody asked for.

        A server whose own file is on that disk refuses to let pins go until it has noticed that there is room again.
        """
        self._settled = await self._compute(self._checkpoints.complete)
        if self._settled and self._settled[-1] == self._back_to:  # else the newest one is off this learner's lineage
            await self._compute(self._checkpoints.retain, 1)
            self._settled = await self._compute(self._checkpoints.complete)
        for pause_s in _PAUSES_S:
            await asyncio.sleep(pause_s)
            if await self._retain(0):
                return

    async def _retain(self, newest: int) -> Sequence[int]:
        keep = {*self._settled, *self.kept, self.head, *([self._base.number] if self._base is not None else ())}
        return await self._registry.retain(sorted(keep), newest)


def _base_of(manifests: Mapping[int, VersionManifest], number: int) -> _Base | None:
    """Of an adapter the version that it is over, of another version itself; None where that cannot be read.

    A learner that died before its first checkpoint has left a version like it: the newest is the one whose files stay.
    """
    found = manifests.get(number)
    if found is not None and found.kind == ADAPTER:
        alike = [each for each in manifests.values() if each.content_hash == found.ref.base_hash]
        found = max(alike, key=lambda each: each.ref.number, default=None)
    return _Base(found.ref.number, found.content_hash) if found is not None else None


def _lineage(manifests: Iterable[VersionManifest]) -> dict[int, VersionNode]:
    """Parent and B of every version whose way to the first one can be read."""
    lineage: dict[int, VersionNode] = {}
    for manifest in sorted(manifests, key=lambda one: one.ref.number):
        parent = NO_VERSION if manifest.parent is None else manifest.parent
        if parent == NO_VERSION or parent in lineage:
            lineage[manifest.ref.number] = VersionNode(parent, manifest.batches)
    return lineage


def _ancestors(manifests: Mapping[int, VersionManifest], head: int) -> set[int]:
    """The head and every version that its way to the first one passes, as far as that can be read."""
    found, version = {head}, manifests.get(head)
    while version is not None and version.parent is not None:
        found.add(version.parent)
        version = manifests.get(version.parent)
    return found
