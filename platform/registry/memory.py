"""The version registry of one process: the fake for tests and the registry of the in-process runtime.

Blobs are bytes in memory; `open` lays them out in a temporary folder, which goes with the registry.
"""

import shutil
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace.platform.contracts import Clock, Ledger
from headrace.platform.errors import NotFound, RegistryError
from headrace.platform.records.versions import VersionManifest
from headrace.platform.registry.hashing import (
    Blob,
    blob_folder,
    blob_of,
    check_file_name,
    content_hash,
    file_hash,
)
from headrace.platform.registry.pins import MemoryPins
from headrace.platform.registry.retention import dead_orphans, unwanted
from headrace.platform.registry.watching import wait_committed


class MemoryRegistry:
    """`VersionRegistry` without a file store. `clock` times the pins."""

    def __init__(self, ledger: Ledger, clock: Clock = time.monotonic) -> None:
        self._ledger = ledger
        self._pins = MemoryPins(clock)
        self._blobs: dict[str, dict[str, bytes]] = {}
        self._manifests: dict[int, VersionManifest] = {}
        self._highest = -1
        self._epoch = 0
        self._root = Path(tempfile.mkdtemp(prefix="headrace-versions-"))
        self._finalizer = weakref.finalize(self, shutil.rmtree, self._root, ignore_errors=True)

    async def stage(self, number: int, fence: int, files: Mapping[str, bytes]) -> tuple[str, dict[str, str], str]:
        """See `VersionRegistry.stage`."""
        for name in files:
            check_file_name(name)
        path = blob_folder(number, fence)
        self._blobs[path] = dict(files)
        self._highest = max(self._highest, number)
        hashes = {name: file_hash(data) for name, data in files.items()}
        return path, hashes, content_hash(hashes)

    async def manifest(self, manifest: VersionManifest) -> None:
        """See `VersionRegistry.manifest`. The same manifest again is fine: its reply may have been lost."""
        number = manifest.ref.number
        if self._manifests.setdefault(number, manifest) != manifest:
            raise RegistryError(f"version {number} has another manifest already")
        self._highest = max(self._highest, number)

    async def open(self, version: int) -> tuple[VersionManifest, str]:
        """See `VersionRegistry.open`."""
        manifest = self._find(version)
        blobs = self._blobs.get(manifest.path)
        if blobs is None:
            raise NotFound(f"the files of version {version} were removed")
        for name, expected in manifest.files.items():
            if name not in blobs or file_hash(blobs[name]) != expected:
                raise RegistryError(f"{manifest.path}/{name} is missing or altered")
        folder = self._root / manifest.path
        folder.mkdir(parents=True, exist_ok=True)
        for name in manifest.files:
            # A reader may have mapped a file that is there already: it is never written again.
            if not (folder / name).exists():
                (folder / name).write_bytes(blobs[name])
        return manifest, str(folder)

    def _find(self, version: int) -> VersionManifest:
        if version not in self._manifests:
            raise NotFound(f"version {version} does not exist")
        return self._manifests[version]

    async def latest(self) -> VersionManifest | None:
        """See `VersionRegistry.latest`."""
        return self._manifests[max(self._manifests)] if self._manifests else None

    async def manifests(self, after: int = -1) -> Sequence[VersionManifest]:
        """See `VersionRegistry.manifests`."""
        return [self._manifests[number] for number in sorted(self._manifests) if number > after]

    async def highest_number(self) -> int:
        """See `VersionRegistry.highest_number`."""
        return self._highest

    async def claim_epoch(self) -> int:
        """See `VersionRegistry.claim_epoch`."""
        self._epoch += 1
        return self._epoch

    async def watch(self, after: int, timeout_s: float) -> VersionManifest | None:
        """See `VersionRegistry.watch`."""
        number = await wait_committed(self._ledger, after, timeout_s)
        return None if number is None else self._find(number)

    async def pin(self, version: int, holder: str, ttl_s: float) -> None:
        """See `VersionRegistry.pin`."""
        self._find(version)
        if not await self._pins.pin(version, holder, ttl_s):
            raise NotFound(f"the files of version {version} were removed")

    async def unpin(self, version: int, holder: str) -> None:
        """See `VersionRegistry.unpin`."""
        await self._pins.unpin(version, holder)

    async def retain(self, keep: Sequence[int], newest: int) -> Sequence[int]:
        """See `VersionRegistry.retain`. Manifests stay: they are the chain (P8). Orphans whose writer is known to be
        fenced off go as well."""
        blobs = {blob for path in self._blobs if (blob := blob_of(path.rpartition("/")[2])) is not None}
        named = {number: manifest.fence for number, manifest in self._manifests.items()}
        present = {blob.number for blob in blobs if named.get(blob.number) == blob.fence}
        removed = [number for number in unwanted(present, keep, newest) if await self._pins.retire(number)]
        stats = await self._ledger.stats()
        orphans = () if stats.suspect else dead_orphans(blobs, named, stats.fence)
        for blob in [*(Blob(named[number], number) for number in removed), *orphans]:
            path = blob_folder(blob.number, blob.fence)
            del self._blobs[path]
            shutil.rmtree(self._root / path, ignore_errors=True)
        return removed

    async def close(self) -> None:
        """Remove the folders that `open` made."""
        self._finalizer()
