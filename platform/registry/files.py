"""The version registry on files: any fsspec URL, a hash-checked cache on each node, pins on a table of its own.

Layout below the root: `versions/f{fence}-v{number}/FILE` for blobs and `versions/{number}.json` for manifests. A
version exists when its manifest does, and the manifest is written exclusively and last (P8): half-written blobs are
orphans that nobody reads. It is published when the ledger's head says so; `watch` asks the ledger.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from headrace.platform.contracts import Ledger
from headrace.platform.errors import NotFound, RegistryError
from headrace.platform.records.versions import VersionManifest
from headrace.platform.registry.blobs import BlobStore
from headrace.platform.registry.hashing import blob_folder, check_file_name, content_hash, file_hash, manifest_file
from headrace.platform.registry.pins import PinTable
from headrace.platform.registry.watching import wait_committed

_MANIFEST = re.compile(r"(\d{6,})\.json")
_BLOBS = re.compile(r"f\d+-v(\d+)")


class FileRegistry:
    """`VersionRegistry` below `root_url`.

    Args:
        root_url: the run root, a folder or fsspec URL that all processes of the run can reach.
        ledger: tells which versions are committed.
        cache_dir: node-local folder for copies; not used when the root itself is local.
        run: the run's id; keeps the copies of different runs apart.
        pins: the table that all processes of the run share; `MemoryPins` only where there is one process.
    """

    def __init__(self, root_url: str, ledger: Ledger, *, cache_dir: Path, run: str, pins: PinTable) -> None:
        self._store = BlobStore(root_url)
        self._ledger = ledger
        self._cache = Path(cache_dir) / run
        self._pins = pins

    async def stage(self, number: int, fence: int, files: Mapping[str, bytes]) -> tuple[str, dict[str, str], str]:
        """See `VersionRegistry.stage`."""
        for name in files:
            check_file_name(name)
        path = blob_folder(number, fence)
        await asyncio.to_thread(self._store.write_folder, path, files)
        hashes = {name: file_hash(data) for name, data in files.items()}
        return path, hashes, content_hash(hashes)

    async def manifest(self, manifest: VersionManifest) -> None:
        """See `VersionRegistry.manifest`. The same manifest again is fine: its reply may have been lost."""
        number = manifest.ref.number
        data = msgspec.json.encode(manifest)
        try:
            await asyncio.to_thread(self._store.create, manifest_file(number), data)
        except FileExistsError:
            if await self._read(number) != manifest:
                raise RegistryError(f"version {number} has another manifest already") from None

    async def _read(self, number: int) -> VersionManifest:
        path = manifest_file(number)
        try:
            data = await asyncio.to_thread(self._store.read, path)
        except FileNotFoundError:
            raise NotFound(f"version {number} does not exist: there is no {self._store.full(path)}") from None
        try:
            manifest = msgspec.json.decode(data, type=VersionManifest)
        except msgspec.DecodeError as error:
            raise RegistryError(f"{self._store.full(path)} is torn: {error}") from error
        for name in manifest.files:
            check_file_name(name)
        return manifest

    async def open(self, version: int) -> tuple[VersionManifest, str]:
        """See `VersionRegistry.open`."""
        manifest = await self._read(version)
        folder = blob_folder(version, manifest.fence)
        if manifest.path != folder:
            raise RegistryError(f"the manifest of version {version} names {manifest.path} instead of {folder}")
        if folder.rpartition("/")[2] not in await asyncio.to_thread(self._store.names, "versions"):
            raise NotFound(f"the files of version {version} were removed")
        if self._store.is_local:
            return manifest, await asyncio.to_thread(self._store.verify, folder, manifest.files)
        return manifest, await asyncio.to_thread(self._store.copy_verified, folder, manifest.files, self._cache)

    async def latest(self) -> VersionManifest | None:
        """See `VersionRegistry.latest`. A torn manifest was never made durable, so its version was never committed:
        the one before it counts."""
        for number in sorted(await self._numbers(_MANIFEST), reverse=True):
            try:
                return await self._read(number)
            except RegistryError:
                continue
        return None

    async def _numbers(self, pattern: re.Pattern[str]) -> set[int]:
        names = await asyncio.to_thread(self._store.names, "versions")
        return {int(found[1]) for name in names if (found := pattern.fullmatch(name))}

    async def watch(self, after: int, timeout_s: float) -> VersionManifest | None:
        """See `VersionRegistry.watch`. Raises RegistryError for a committed version with a torn manifest."""
        number = await wait_committed(self._ledger, after, timeout_s)
        return None if number is None else await self._read(number)

    async def pin(self, version: int, holder: str, ttl_s: float) -> None:
        """See `VersionRegistry.pin`."""
        await self._read(version)
        if not await self._pins.pin(version, holder, ttl_s):
            raise NotFound(f"the files of version {version} were removed")

    async def unpin(self, version: int, holder: str) -> None:
        """See `VersionRegistry.unpin`."""
        await self._pins.unpin(version, holder)

    async def retain(self, keep: Sequence[int], newest: int) -> Sequence[int]:
        """See `VersionRegistry.retain`. Manifests stay: they are the chain (P8)."""
        present = sorted(await self._numbers(_BLOBS) & await self._numbers(_MANIFEST))
        kept = {*keep, *present[max(len(present) - newest, 0) :]}
        removed = []
        for number in present:
            if number not in kept and await self._pins.retire(number):
                manifest = await self._read(number)
                await asyncio.to_thread(self._store.remove_folder, blob_folder(number, manifest.fence))
                removed.append(number)
        return removed

    async def close(self) -> None:
        """Release the pins' connections; the ledger is its owner's."""
        await self._pins.close()
