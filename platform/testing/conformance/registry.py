"""What every `VersionRegistry` must do. Run each function of `REGISTRY_SUITE` on a factory of yours.

A factory gives an async context manager around a `RegistryHarness` with a fresh registry and its ledger.
"""

import asyncio
from collections.abc import Awaitable, Callable
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

    async def stage(self, number: int, files: dict[str, bytes] = FILES, fence: int = 1) -> VersionManifest:
        """Write a version's files; returns a manifest that has not been created yet."""
        path, hashes, content_hash = await self.registry.stage(number, fence, files)
        return VersionManifest(
            ref=VersionRef("policy", number, fence),
            parent=number - 1 if number else None,
            parent_hash="",
            fence=fence,
            kind="full",
            content_hash=content_hash,
            batches=number,
            path=path,
            files=hashes,
        )

    async def write(self, number: int, files: dict[str, bytes] = FILES) -> VersionManifest:
        """A version with its manifest, not committed."""
        manifest = await self.stage(number, files)
        await self.registry.manifest(manifest)
        return manifest

    async def publish(self) -> VersionManifest:
        """The next version: files, manifest, commit, in this order (P8)."""
        self.fence = self.fence or await self.ledger.acquire_learner("learner")
        head = (await self.ledger.stats()).head
        number = await self.ledger.stage(self.fence)
        manifest = await self.write(number)
        await self.ledger.commit(
            CommitRequest(
                fence=self.fence,
                number=number,
                parent=NO_VERSION if head is None else head,
                content_hash=manifest.content_hash,
                batches=1,
                fates={},
            )
        )
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
        await h.write(1)
        assert await h.registry.watch(0, 0.01) is None
        waiting = asyncio.create_task(h.registry.watch(0, 30.0))
        await h.ledger.stage(h.fence)
        second = await h.publish()
        assert await waiting == second
        await h.ledger.rollback(h.fence, 0)
        assert await h.registry.watch(second.ref.number, 0.01) is None


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
        only_committed_versions_are_seen,
        pinned_versions_stay,
        pins_end,
    )
}
"""Every case, by name."""
