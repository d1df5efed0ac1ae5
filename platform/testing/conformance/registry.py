"""What every `VersionRegistry` must do. Run each function of `REGISTRY_SUITE` on a factory of yours.

A factory gives an async context manager around a `RegistryHarness` with a fresh registry and its ledger.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

from headrace.platform.contracts import Ledger, VersionRegistry
from headrace.platform.errors import NotFound, RegistryError
from headrace.platform.ledger.policy import NO_VERSION
from headrace.platform.records.delivery import CommitRequest
from headrace.platform.records.versions import VersionManifest, VersionRef
from headrace.platform.testing.conformance.ledger_harness import raises

FILES = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 8}


@dataclass(kw_only=True, slots=True)
class RegistryHarness:
    """A fresh registry over a fresh ledger. `advance` lets the time of the pins pass."""

    registry: VersionRegistry
    ledger: Ledger
    advance: Callable[[float], Awaitable[None]]
    fence: int = 0

    async def stage(
        self, number: int, files: Mapping[str, bytes] = FILES, fence: int = 1, parent: VersionManifest | None = None
    ) -> VersionManifest:
        """Write a version's files; returns a manifest that has not been created yet."""
        path, hashes, content_hash = await self.registry.stage(number, fence, files)
        return VersionManifest(
            ref=VersionRef("policy", number, fence),
            parent=None if parent is None else parent.ref.number,
            parent_hash="" if parent is None else parent.content_hash,
            fence=fence,
            kind="full",
            content_hash=content_hash,
            batches=0 if parent is None else parent.batches + 1,
            path=path,
            files=hashes,
        )

    async def write(self, number: int, files: Mapping[str, bytes] = FILES, fence: int = 1) -> VersionManifest:
        """A version with its manifest, not committed."""
        manifest = await self.stage(number, files, fence)
        await self.registry.manifest(manifest)
        return manifest

    async def take_over(self) -> None:
        """Become the learner, whoever is."""
        self.fence = await self.ledger.acquire_learner("learner", takeover=True)

    async def prepare(self, files: Mapping[str, bytes] = FILES) -> VersionManifest:
        """Stage the version that would follow the head; its manifest has not been created yet."""
        if not self.fence:
            await self.take_over()
        head = (await self.ledger.stats()).head
        parent = None if head is None else (await self.registry.manifests(after=head - 1))[0]
        number = await self.ledger.stage(self.fence, await self.registry.highest_number() + 1)
        return await self.stage(number, files, self.fence, parent)

    async def commit(self, manifest: VersionManifest) -> None:
        """Publish a version whose manifest exists."""
        parent = NO_VERSION if manifest.parent is None else manifest.parent
        await self.ledger.commit(
            CommitRequest(
                fence=manifest.fence,
                number=manifest.ref.number,
                parent=parent,
                content_hash=manifest.content_hash,
                batches=0 if parent == NO_VERSION else 1,
                fates={},
            )
        )

    async def publish(self, files: Mapping[str, bytes] = FILES) -> VersionManifest:
        """The next version: files, manifest, commit, in this order (P8)."""
        manifest = await self.prepare(files)
        await self.registry.manifest(manifest)
        await self.commit(manifest)
        return manifest


RegistryFactory = Callable[[], AbstractAsyncContextManager[RegistryHarness]]
RegistryCase = Callable[[RegistryFactory], Awaitable[None]]


async def a_version_comes_back_as_written(factory: RegistryFactory) -> None:
    """`open` gives the manifest and a folder with exactly the bytes that were staged."""
    async with factory() as h:
        manifest = await h.write(0)
        assert "0001" in manifest.path, f"the blob path {manifest.path} must contain the fence (P7)"
        found, folder = await h.registry.open(0)
        assert found == manifest
        read = {name: await asyncio.to_thread(Path(folder, name).read_bytes) for name in manifest.files}
        assert read == FILES


async def content_decides_the_hash(factory: RegistryFactory) -> None:
    """Equal files have equal hashes, in any order and under any number; a changed name or byte changes it."""
    async with factory() as h:
        first = await h.stage(0)
        same = await h.stage(1, dict(reversed(FILES.items())))
        renamed = await h.stage(2, {"config2.json": FILES["config.json"], "model.safetensors": FILES["config.json"]})
        assert first.content_hash == same.content_hash != renamed.content_hash


async def blobs_without_a_manifest_do_not_exist(factory: RegistryFactory) -> None:
    """P6, P8: staged files are orphans until the manifest is there."""
    async with factory() as h:
        await h.stage(0)
        await raises(NotFound, h.registry.open(0))
        await raises(NotFound, h.registry.pin(0, "holder", 60.0))
        assert await h.registry.latest() is None


async def manifests_are_exclusive(factory: RegistryFactory) -> None:
    """P8: the same again is fine (a lost reply), another under the same number is refused and changes nothing."""
    async with factory() as h:
        manifest = await h.write(0)
        await h.registry.manifest(manifest)
        await raises(RegistryError, h.registry.manifest(await h.stage(0, {"config.json": b"[]"}, fence=2)))
        assert (await h.registry.open(0))[0] == manifest


async def names_never_leave_the_folder(factory: RegistryFactory) -> None:
    """A file name with a path in it is refused."""
    async with factory() as h:
        for name in ("../evil", "a/b", "", ".."):
            await raises(RegistryError, h.registry.stage(0, 1, {name: b""}))


async def latest_is_the_newest(factory: RegistryFactory) -> None:
    """By number, committed or not."""
    async with factory() as h:
        await h.write(0)
        await h.write(2)
        await h.write(1)
        latest = await h.registry.latest()
        assert latest is not None
        assert latest.ref.number == 2


async def only_committed_versions_are_seen(factory: RegistryFactory) -> None:
    """`watch` waits for a commit, not for a manifest; a rollback is no new version (P6)."""
    async with factory() as h:
        first = await h.publish()
        assert await h.registry.watch(NO_VERSION, 30.0) == first
        await h.registry.manifest(await h.prepare())
        assert await h.registry.watch(0, 0.01) is None
        waiting = asyncio.create_task(h.registry.watch(0, 30.0))
        second = await h.publish()
        assert await waiting == second
        await h.ledger.rollback(h.fence, 0)
        assert await h.registry.watch(second.ref.number, 0.01) is None


async def the_chain_is_read_in_order(factory: RegistryFactory) -> None:
    """P8: every manifest above a number, in order; orphans are none of them (P6)."""
    async with factory() as h:
        assert list(await h.registry.manifests()) == []
        written = {number: await h.write(number) for number in (0, 3, 1)}
        await h.stage(7)
        assert list(await h.registry.manifests()) == [written[0], written[1], written[3]]
        assert list(await h.registry.manifests(after=0)) == [written[1], written[3]]
        assert list(await h.registry.manifests(after=3)) == []


async def used_numbers_are_remembered(factory: RegistryFactory) -> None:
    """P6: an orphan has used its number as well as a version, and a version without files still has."""
    async with factory() as h:
        assert await h.registry.highest_number() == NO_VERSION
        await h.write(0)
        await h.write(1)
        assert await h.registry.highest_number() == 1
        await h.registry.retain([0], newest=0)
        assert await h.registry.highest_number() == 1
        await h.stage(4)
        assert await h.registry.highest_number() == 4


async def epochs_are_claimed_once(factory: RegistryFactory) -> None:
    """P8: each claim is above every earlier one, also of those that claim at the same time."""
    async with factory() as h:
        first = [await h.registry.claim_epoch() for _ in range(3)]
        together = await asyncio.gather(*(h.registry.claim_epoch() for _ in range(4)))
        assert first[0] > 0
        assert first == sorted(set(first))
        assert len({*together}) == 4, f"an epoch was claimed twice: {together}"
        assert min(together) > max(first)
        assert await h.registry.latest() is None
        assert await h.registry.highest_number() == NO_VERSION


async def dead_orphans_go(factory: RegistryFactory) -> None:
    """P6, P7: files without a manifest go once their writer is fenced off, never before, and no version with them."""
    async with factory() as h:
        first = await h.publish()
        dead = await h.prepare({"config.json": b"dead"})
        last = await h.publish()
        await h.registry.retain([], newest=9)
        await h.registry.manifest(dead)
        await h.registry.open(dead.ref.number)
        orphan = await h.prepare({"config.json": b"orphan"})
        await h.take_over()
        await h.publish()
        assert await h.registry.retain([], newest=9) == []
        await h.registry.manifest(orphan)
        await raises(NotFound, h.registry.open(orphan.ref.number))
        for manifest in (first, dead, last):
            await h.registry.open(manifest.ref.number)


async def pinned_versions_stay(factory: RegistryFactory) -> None:
    """Case Q17: kept, newest and pinned versions stay; the rest goes, and cannot be pinned or opened any more."""
    async with factory() as h:
        for number in range(6):
            await h.write(number)
        await h.registry.pin(0, "evaluation", 60.0)
        await h.registry.pin(0, "replica", 60.0)
        await h.registry.unpin(0, "replica")
        assert await h.registry.retain([1], newest=2) == [2, 3]
        for number in (0, 1, 4, 5):
            await h.registry.open(number)
        await raises(NotFound, h.registry.open(2))
        await raises(NotFound, h.registry.pin(2, "late", 60.0))
        assert await h.registry.retain([1], newest=2) == []
        await raises(RegistryError, h.registry.manifest(await h.stage(2, {"config.json": b"new"})))


async def pins_end(factory: RegistryFactory) -> None:
    """A pin holds until it is given back or its time is over; pinning again renews it (P12)."""
    async with factory() as h:
        await h.write(0)
        await h.write(1)
        await h.registry.unpin(0, "nobody")
        await h.registry.pin(0, "replica", 60.0)
        await h.advance(50.0)
        await h.registry.pin(0, "replica", 60.0)
        await h.advance(50.0)
        assert await h.registry.retain([], newest=1) == []
        await h.advance(11.0)
        assert await h.registry.retain([], newest=1) == [0]


REGISTRY_SUITE: dict[str, RegistryCase] = {
    case.__name__: case
    for case in (
        a_version_comes_back_as_written,
        content_decides_the_hash,
        blobs_without_a_manifest_do_not_exist,
        manifests_are_exclusive,
        names_never_leave_the_folder,
        latest_is_the_newest,
        the_chain_is_read_in_order,
        used_numbers_are_remembered,
        epochs_are_claimed_once,
        dead_orphans_go,
        only_committed_versions_are_seen,
        pinned_versions_stay,
        pins_end,
    )
}
"""Every case, by name."""
