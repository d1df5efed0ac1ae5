"""Publishing and settling: the order of writes that makes a version exist (P5, P7, P8).

stage (number and blobs) ─► manifest, exclusive ─► ledger commit ─► ... ─► checkpoint, complete ─► settle ─► retain

A crash between any two leaves something that readers pass over: blobs without a manifest, a manifest that was never
committed, parts without a checkpoint manifest. Owns the head as this learner sees it; computes nothing.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from headrace.platform.contracts import Clock, Ledger, VersionRegistry
from headrace.platform.errors import CommitRefused, RunFailed
from headrace.platform.ledger.policy import NO_VERSION
from headrace.platform.records.delivery import CommitRequest
from headrace.platform.records.versions import VersionManifest, VersionRef
from headrace.trainer.checkpoint import CheckpointState, CheckpointStore

Compute = Callable[..., Awaitable[Any]]
"""Calls a blocking function, off the event loop or on it."""


class Publisher:
    """See the module. `head` is -1 before the first version; `batches` is B(head) of P14."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        registry: VersionRegistry,
        checkpoints: CheckpointStore,
        policy_id: str,
        keep_versions: int,
        clock: Clock,
        compute: Compute,
    ) -> None:
        self._ledger = ledger
        self._registry = registry
        self._checkpoints = checkpoints
        self._policy_id = policy_id
        self._keep_versions = keep_versions
        self._clock = clock
        self._compute = compute
        self._head_hash = ""
        self._settled: list[int] = []
        self.kept: frozenset[int] = frozenset()
        """Versions that retention leaves alone because somebody outside asked for it."""
        self.fence = 0
        self.head = NO_VERSION
        self.batches_of: dict[int, int] = {}

    @property
    def batches(self) -> int:
        """B(head)."""
        return self.batches_of.get(self.head, 0)

    async def take_over(self, holder: str) -> bool:
        """Become the learner; whether the run has a head already."""
        self.fence = await self._ledger.acquire_learner(holder)
        return (await self._ledger.stats()).head is not None

    async def resume(self) -> tuple[CheckpointState, dict[str, bytes]]:
        """Go back to the newest complete checkpoint (P6); what later versions consumed comes again.

        Raises:
            RunFailed: there is none.
        """
        found = await self._compute(self._checkpoints.latest_complete)
        if found is None:
            raise RunFailed("the run has committed versions but no complete checkpoint; it cannot be resumed")
        state: CheckpointState = found[0]
        # The last learner may have died between writing the checkpoint and settling it.
        await self._ledger.settle(self.fence, state.version)
        await self._ledger.rollback(self.fence, state.version)
        self.head, self._head_hash = state.version, state.content_hash
        self.batches_of, self._settled = {state.version: state.batches}, [state.version]
        return state, found[1]

    async def reserve(self) -> int:
        """A version number, for the next `publish`. Raises Fenced."""
        return await self._ledger.stage(self.fence)

    async def publish(
        self,
        number: int,
        files: Mapping[str, bytes],
        *,
        batches: int,
        fates: Mapping[str, str],
        episode_files: Sequence[str],
    ) -> None:
        """Make version `number`, `batches` learner batches after the head, the new head.

        Raises:
            Fenced: another learner holds the run.
            RunFailed: the ledger refused the commit; no later one could be accepted.
        """
        path, hashes, content_hash = await self._registry.stage(number, self.fence, files)
        total = self.batches + batches
        await self._registry.manifest(
            VersionManifest(
                ref=VersionRef(self._policy_id, number, lineage=self.fence),
                parent=None if self.head == NO_VERSION else self.head,
                parent_hash=self._head_hash,
                fence=self.fence,
                kind="full",
                content_hash=content_hash,
                batches=total,
                path=path,
                files=hashes,
                consumed=dict(fates),
                episode_files=tuple(episode_files),
                created_at_s=self._clock(),
            )
        )
        request = CommitRequest(
            fence=self.fence,
            number=number,
            parent=self.head,
            content_hash=content_hash,
            batches=batches,
            fates=dict(fates),
        )
        try:
            await self._ledger.commit(request)
        except CommitRefused as error:
            raise RunFailed(f"version {number} was not accepted: {error}") from error
        self.head, self._head_hash, self.batches_of[number] = number, content_hash, total

    async def settle(self, files: Mapping[str, bytes], steps: int) -> None:
        """Write a complete checkpoint of the head; what its ancestors consumed is then final (P5)."""
        state = CheckpointState(
            version=self.head,
            content_hash=self._head_hash,
            batches=self.batches,
            steps=steps,
            dispatch_sequence=(await self._ledger.stats()).dispatch_sequence,
        )
        await self._compute(self._checkpoints.write, state, files)
        await self._ledger.settle(self.fence, self.head)
        self._settled.append(self.head)

    async def retain(self) -> None:
        """Remove the weights of versions that are neither new, nor checkpointed, nor kept, nor pinned."""
        await self._registry.retain(sorted({*self._settled, *self.kept, self.head}), self._keep_versions)
