"""The version registry on files: any fsspec URL, a hash-checked cache on each node, pins on a table of its own.

Layout below the root: `versions/f{fence}-v{number}/FILE` for blobs, `versions/{number}.json` for manifests, and
`versions/epochs/{epoch}` for the epochs that were claimed. A version exists when its manifest does, and the manifest is
written exclusively and last (P8): half-written blobs are orphans that nobody reads (P6). It is published when the
ledger's head says so; `watch` asks the ledger.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from headrace.platform.contracts import Ledger
from headrace.platform.errors import DeadlineExceeded, LedgerAway, NotFound, RegistryError, SchemaError
from headrace.platform.records.versions import VersionManifest
from headrace.platform.registry.blobs import BlobStore
from headrace.platform.registry.hashing import (
    EPOCHS,
    Blob,
    blob_folder,
    blob_of,
    check_file_name,
    content_hash,
    epoch_file,
    file_hashes,
    manifest_file,
    manifest_of,
)
from headrace.platform.registry.pins import PinTable
from headrace.platform.registry.retention import dead_orphans, unwanted
from headrace.platform.registry.watching import wait_committed

_SCHEMAS = (1, 2)
"""Of manifests; the first has no groups."""
_log = logging.getLogger(__name__)


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
        _, hashes = await asyncio.gather(
            asyncio.to_thread(self._store.write_folder, path, files),
            asyncio.to_thread(file_hashes, files),
        )
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
        return self._decode(path, data)

    def _decode(self, path: str, data: bytes) -> VersionManifest:
        try:
            manifest = msgspec.json.decode(data, type=VersionManifest)
        except msgspec.DecodeError as error:
            raise RegistryError(f"{self._store.full(path)} is torn: {error}") from error
        if manifest.schema_version not in _SCHEMAS:
            raise SchemaError(
                f"{self._store.full(path)} has schema {manifest.schema_version}; this build reads {_SCHEMAS}"
            )
        for name in manifest.files:
            check_file_name(name)
        return manifest

    async def _readable(self, numbers: Sequence[int]) -> list[VersionManifest]:
        """The manifests of `numbers`, in order. A torn one was never made durable, so its version was never committed:
        it is passed over."""
        paths = [manifest_file(number) for number in numbers]
        found = await asyncio.to_thread(self._store.read_many, paths)
        manifests = []
        for path in paths:
            if path in found:
                try:
                    manifests.append(self._decode(path, found[path]))
                except RegistryError as error:
                    _log.warning("passed over: %s", error)
        return manifests

    async def open(self, version: int) -> tuple[VersionManifest, str]:
        """See `VersionRegistry.open`."""
        manifest = await self._read(version)
        folder = blob_folder(version, manifest.fence)
        if manifest.path != folder:
            raise RegistryError(f"the manifest of version {version} names {manifest.path} instead of {folder}")
        if not await asyncio.to_thread(self._store.has_folder, folder):
            raise NotFound(f"the files of version {version} were removed")
        if self._store.is_local:
            return manifest, await asyncio.to_thread(self._store.verify, folder, manifest.files)
        return manifest, await asyncio.to_thread(self._store.copy_verified, folder, manifest.files, self._cache)

    async def latest(self) -> VersionManifest | None:
        """See `VersionRegistry.latest`."""
        for number in sorted(await self._manifest_numbers(), reverse=True):
            if manifests := await self._readable([number]):
                return manifests[0]
        return None

    async def manifests(self, after: int = -1) -> Sequence[VersionManifest]:
        """See `VersionRegistry.manifests`."""
        return await self._readable(sorted(number for number in await self._manifest_numbers() if number > after))

    async def highest_number(self) -> int:
        """See `VersionRegistry.highest_number`. A torn manifest and an orphan have used their numbers, too (P6)."""
        numbers = {blob.number for blob in await self._blobs()}
        return max(numbers | await self._manifest_numbers(), default=-1)

    async def claim_epoch(self) -> int:
        """See `VersionRegistry.claim_epoch`."""
        while True:
            claimed = await asyncio.to_thread(self._store.names, EPOCHS)
            epoch = max((int(name) for name in claimed if name.isdecimal()), default=0) + 1
            try:
                await asyncio.to_thread(self._store.create, epoch_file(epoch), b"")
            except FileExistsError:
                continue
            return epoch

    async def _names(self) -> list[str]:
        return await asyncio.to_thread(self._store.names, "versions")

    async def _manifest_numbers(self) -> set[int]:
        return {number for name in await self._names() if (number := manifest_of(name)) is not None}

    async def _blobs(self) -> set[Blob]:
        return {blob for name in await self._names() if (blob := blob_of(name)) is not None}

    async def watch(self, after: int, timeout_s: float) -> VersionManifest | None:
        """See `VersionRegistry.watch`. Raises RegistryError for a committed version with a torn manifest."""
        number = await wait_committed(self._ledger, after, timeout_s)
        return None if number is None else await self._read(number)

    async def pin(self, version: int, holder: str, ttl_s: float) -> None:
        """See `VersionRegistry.pin`. A table that lost its memory knows nothing of versions that were removed, so
        the files are looked for once they are held (case Q17)."""
        folder = blob_folder(version, (await self._read(version)).fence)
        if not await self._pins.pin(version, holder, ttl_s):
            raise NotFound(f"the files of version {version} were removed")
        if not await asyncio.to_thread(self._store.has_folder, folder):
            await self._pins.unpin(version, holder)
            raise NotFound(f"the files of version {version} were removed")

    async def unpin(self, version: int, holder: str) -> None:
        """See `VersionRegistry.unpin`."""
        await self._pins.unpin(version, holder)

    async def retain(self, keep: Sequence[int], newest: int) -> Sequence[int]:
        """See `VersionRegistry.retain`. Manifests stay: they are the chain (P8). Orphans whose writer is known to be
        fenced off go as well. A server that is away only puts off what is left to do."""
        blobs = await self._blobs()
        numbers = sorted({blob.number for blob in blobs} & await self._manifest_numbers())
        named = {manifest.ref.number: manifest.fence for manifest in await self._readable(numbers)}
        present = {blob.number for blob in blobs if named.get(blob.number) == blob.fence}
        removed: list[int] = []
        try:
            for number in unwanted(present, keep, newest):
                if await self._pins.retire(number):
                    await self._remove(Blob(named[number], number))
                    removed.append(number)
            stats = await self._ledger.stats()
            if not stats.suspect:
                for orphan in dead_orphans(blobs, named, stats.fence):
                    await self._remove(orphan)
        except (LedgerAway, DeadlineExceeded) as error:
            _log.warning("the removal of old versions goes on later: %s", error)
        return removed

    async def _remove(self, blob: Blob) -> None:
        await asyncio.to_thread(self._store.remove_folder, blob_folder(blob.number, blob.fence))

    async def close(self) -> None:
        """Release the pins' connections; the ledger is its owner's."""
        await self._pins.close()
