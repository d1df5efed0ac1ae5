"""A version of a stored run as a model folder, by number or by what people call it. An adapter is given with its base.

The registry's files are checked by hash before they are used. Where retention has removed a version's weights, or the
run kept its registry in memory (runtime.kind=inprocess), a checkpoint that settled the version holds the same weights.
"""

import asyncio
from pathlib import Path

import msgspec

from headrace.deploy.context import POLICY_ID
from headrace.deploy.merged_version import merged_folder
from headrace.platform.errors import ConfigError, NotFound, RegistryError
from headrace.platform.ledger.memory import MemoryLedger
from headrace.platform.node_cache import node_cache
from headrace.platform.records.delivery import LedgerLimits
from headrace.platform.records.versions import ADAPTER, ADAPTER_CONFIG_FILE, FULL, VersionManifest, VersionRef
from headrace.platform.registry.adapters import base_of
from headrace.platform.registry.blobs import BlobStore
from headrace.platform.registry.files import FileRegistry
from headrace.platform.registry.hashing import blob_of
from headrace.platform.registry.pins import MemoryPins
from headrace.platform.store.run_root import RunRoot
from headrace.trainer.checkpoint import MANIFEST, CheckpointManifest

_FOLDER = "checkpoints"
_MOST_DIGITS = 18


async def open_version(root: RunRoot, wanted: str, *, as_stored: bool = False) -> tuple[VersionManifest, Path]:
    """The version `wanted` of a run and the folder of its files.

    Args:
        root: the run.
        wanted: a number, `latest`, or `best` (the one with the best evaluation while training).
        as_stored: give a version that is an adapter as one, and not merged into its base.

    Raises:
        ConfigError: `wanted` is none of these.
        NotFound: there is no such version, or its files were removed; names those that are there.
        RegistryError: its files are torn or altered.
    """
    ledger = MemoryLedger(root.name, LedgerLimits(batch_groups=1, max_lag=0), lambda: 0.0)
    cache, store = node_cache() / "versions", BlobStore(root.url)
    registry = FileRegistry(root.url, ledger, cache_dir=cache, run=root.name, pins=MemoryPins(lambda: 0.0))
    manifest, folder = await _open(root, wanted, registry, store, cache)
    if as_stored or manifest.kind != ADAPTER:
        return manifest, folder
    base = await base_of(registry, manifest)
    _, base_folder = await registry.open(base.ref.number)
    target = cache / root.name / f"merged-{manifest.content_hash}"
    whole = await asyncio.to_thread(merged_folder, Path(base_folder), folder, target)
    return msgspec.structs.replace(manifest, kind=FULL, path=str(whole), files={}), whole


async def _open(
    root: RunRoot, wanted: str, registry: FileRegistry, store: BlobStore, cache: Path
) -> tuple[VersionManifest, Path]:
    """As it is stored."""
    checkpoints = _checkpoints(store)
    number = _number(root, wanted)
    if number is None:
        newest = await registry.latest()
        number = newest.ref.number if newest else max(checkpoints, default=None)
    if number is None:
        raise NotFound(f"the run {root.name!r} has published no version yet")
    try:
        manifest, folder = await registry.open(number)
    except NotFound:
        if number not in checkpoints:
            raise NotFound(f"{root.name} has no weights of version {number}; {_known(store, checkpoints)}") from None
        manifest, here = _from_checkpoint(store, number, checkpoints[number], cache / root.name)
        return await _named(registry, manifest), here
    return manifest, Path(folder)


def _number(root: RunRoot, wanted: str) -> int | None:
    """The number that `wanted` names; None for the newest."""
    if wanted == "latest":
        return None
    if wanted == "best":
        return int(root.read_best()["version"])
    digits = wanted.removeprefix("v")
    if not is_number(digits):
        raise ConfigError(f"--version {wanted}: give a number, `latest` or `best`")
    return int(digits)


def is_number(text: str) -> bool:
    """Whether `text` is digits as people type them: `²` and `٣` are digits to Python too. At most 18 of them."""
    return text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS


def _checkpoints(store: BlobStore) -> dict[int, bytes]:
    """The manifests of complete checkpoints by version."""
    numbers = [int(name) for name in store.names(_FOLDER) if is_number(name)]
    found = store.read_many([f"{_checkpoint(number)}/{MANIFEST}" for number in numbers])
    return {number: data for number in numbers if (data := found.get(f"{_checkpoint(number)}/{MANIFEST}")) is not None}


def _checkpoint(number: int) -> str:
    return f"{_FOLDER}/{number:06d}"


async def _named(registry: FileRegistry, manifest: VersionManifest) -> VersionManifest:
    """What a checkpoint holds, under the name of the version that it settled: an adapter's says over which base it
    is."""
    if ADAPTER_CONFIG_FILE not in manifest.files:
        return manifest
    for each in await registry.manifests():
        if each.ref.number == manifest.ref.number:
            return msgspec.structs.replace(manifest, ref=each.ref, kind=ADAPTER)
    raise NotFound(f"{manifest.ref} is an adapter, and over which base is not known: its manifest is gone")


def _from_checkpoint(store: BlobStore, number: int, manifest_data: bytes, cache: Path) -> tuple[VersionManifest, Path]:
    folder = _checkpoint(number)
    try:
        stored = msgspec.json.decode(manifest_data, type=CheckpointManifest)
    except msgspec.DecodeError as error:
        raise RegistryError(f"{store.full(folder)}/{MANIFEST} is torn: {error}") from error
    hashes = {name: part.sha256 for name, part in stored.parts.items()}
    here = store.verify(folder, hashes) if store.is_local else store.copy_verified(folder, hashes, cache)
    manifest = VersionManifest(
        ref=VersionRef(POLICY_ID, number),
        parent=None,
        parent_hash="",
        fence=0,
        kind="full",
        content_hash=stored.state.content_hash,
        batches=stored.state.batches,
        path=folder,
        files=hashes,
    )
    return manifest, Path(here)


def _known(store: BlobStore, checkpoints: dict[int, bytes]) -> str:
    blobs = {blob.number for name in store.names("versions") if (blob := blob_of(name)) is not None}
    numbers = sorted(blobs | checkpoints.keys())
    return f"there are {', '.join(map(str, numbers))}" if numbers else "none is there"
