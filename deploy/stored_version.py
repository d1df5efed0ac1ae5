"""A version of a stored run as a model folder, by number or by what people call it.

The registry's files are checked by hash before they are used. Where retention has removed a version's weights, or the
run kept its registry in memory (runtime.kind=inprocess), a checkpoint that settled the version holds the same weights.
"""

from pathlib import Path

import msgspec

from headrace.deploy.context import POLICY_ID
from headrace.platform.errors import ConfigError, NotFound, RegistryError
from headrace.platform.ledger.memory import MemoryLedger
from headrace.platform.records.delivery import LedgerLimits
from headrace.platform.records.versions import VersionManifest, VersionRef
from headrace.platform.registry.files import FileRegistry
from headrace.platform.registry.hashing import file_hash
from headrace.platform.registry.pins import MemoryPins
from headrace.platform.store.run_root import RunRoot
from headrace.trainer.checkpoint import MANIFEST, CheckpointManifest

_MOST_DIGITS = 18


async def open_version(root: RunRoot, wanted: str) -> tuple[VersionManifest, Path]:
    """The version `wanted` of a run and the folder of its files.

    Args:
        root: the run.
        wanted: a number, `latest`, or `best` (the one with the best evaluation while training).

    Raises:
        ConfigError: `wanted` is none of these.
        NotFound: there is no such version, or its files were removed; names those that are there.
        RegistryError: its files are torn or altered.
    """
    ledger = MemoryLedger(root.name, LedgerLimits(batch_groups=1, max_lag=0), lambda: 0.0)
    cache = Path.home() / ".cache" / "headrace" / "versions"
    registry = FileRegistry(root.url, ledger, cache_dir=cache, run=root.name, pins=MemoryPins(lambda: 0.0))
    checkpoints = _checkpoints(root)
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
            raise NotFound(f"{root.name} has no weights of version {number}; {_known(root, checkpoints)}") from None
        return _from_checkpoint(number, checkpoints[number])
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


def _checkpoints(root: RunRoot) -> dict[int, Path]:
    """The folders of complete checkpoints by version; none where the root is not on a local disk."""
    folder = Path(root.url) / "checkpoints"
    return {int(file.parent.name): file.parent for file in folder.glob(f"*/{MANIFEST}") if is_number(file.parent.name)}


def _from_checkpoint(number: int, folder: Path) -> tuple[VersionManifest, Path]:
    try:
        stored = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=CheckpointManifest)
    except msgspec.DecodeError as error:
        raise RegistryError(f"{folder / MANIFEST} is torn: {error}") from error
    for name, part in stored.parts.items():
        file = folder / name
        if not file.is_file() or file_hash(file.read_bytes()) != part.sha256:
            raise RegistryError(f"{file} is missing, torn or altered: its hash is not that of the manifest")
    manifest = VersionManifest(
        ref=VersionRef(POLICY_ID, number),
        parent=None,
        parent_hash="",
        fence=0,
        kind="full",
        content_hash=stored.state.content_hash,
        batches=stored.state.batches,
        path=f"checkpoints/{folder.name}",
        files={name: part.sha256 for name, part in stored.parts.items()},
    )
    return manifest, folder


def _known(root: RunRoot, checkpoints: dict[int, Path]) -> str:
    blobs = {int(path.name.rpartition("-v")[2]) for path in (Path(root.url) / "versions").glob("f*-v*")}
    numbers = sorted(blobs | checkpoints.keys())
    return f"there are {', '.join(map(str, numbers))}" if numbers else "none is there"
