"""Complete checkpoints on any fsspec URL: written part by part, the manifest last.

A checkpoint is the folder `NNNNNN/` of the version that it settles (P5). It exists when its manifest can be read and
every part that the manifest lists is there with its hash; anything else is an unfinished write, which readers pass
over (case Q16). Nothing is renamed, so object stores serve as well as disks. On a local disk every part is durable
before the manifest is begun. What the parts mean is the backend's business.

Which checkpoint counts depends on the lineage (P6): a learner that was fenced off may have completed one beside it.
The store knows no lineages; whoever resumes says which versions are on his.
"""

import hashlib
import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from headrace.platform.errors import DiskFull, SchemaError
from headrace.platform.store.files import is_local, open_url, put
from headrace.platform.store.full_disk import named_when_full
from headrace.platform.testing.failpoints import failpoint

MANIFEST = "manifest.json"
SCHEMA_VERSION = 1
_FOLDER = re.compile(r"\d{6,}")
_PIECE_BYTES = 1 << 22


class CheckpointState(msgspec.Struct, frozen=True, kw_only=True):
    """What the learner itself needs to go on: its steps, the version's hash and B(version) of P14, and the dispatch
    sequence at that time, which is the position in the data. The parts are those of `world_size` ranks (P13)."""

    version: int
    content_hash: str
    batches: int
    steps: int
    dispatch_sequence: int
    world_size: int = 1


class Part(msgspec.Struct, frozen=True):
    """Size in bytes and sha256 of one file."""

    size: int
    sha256: str


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Says that a checkpoint is complete, and of what."""

    schema_version: int = SCHEMA_VERSION
    state: CheckpointState
    parts: dict[str, Part]


class CheckpointStore:
    """Checkpoints under `root_url`, usually RUN/checkpoints. Calls block; run them off the event loop."""

    def __init__(self, root_url: str) -> None:
        self._fs, self._root = open_url(root_url)

    def write(self, state: CheckpointState, files: Mapping[str, bytes]) -> None:
        """Write the checkpoint of `state.version`; it exists once this returns, and not before the last write.

        Raises:
            DiskFull: nothing is left of it, so that what it took is there for whoever makes room.
        """
        try:
            with named_when_full(self._root):
                self._write(state, files)
        except DiskFull:
            with suppress(FileNotFoundError):
                self._fs.rm(self._folder(state.version), recursive=True)
            raise

    def _write(self, state: CheckpointState, files: Mapping[str, bytes]) -> None:
        folder = self._folder(state.version)
        if is_local(self._fs):
            self._fs.makedirs(folder, exist_ok=True)
        parts = {}
        for name, data in files.items():
            self._put(f"{folder}/{name}", data)
            failpoint("between_shards")
            parts[name] = Part(len(data), hashlib.sha256(data).hexdigest())
        manifest = CheckpointManifest(state=state, parts=parts)
        self._put(f"{folder}/{MANIFEST}", msgspec.json.format(msgspec.json.encode(manifest)))
        if is_local(self._fs):
            _sync_folder(Path(folder))
            _sync_folder(Path(self._root))

    def latest_complete(self, among: Collection[int] | None = None) -> tuple[CheckpointState, dict[str, bytes]] | None:
        """State and files of the newest checkpoint that is whole, or None when there is none.

        Args:
            among: only versions in here count, such as those of a lineage; None for all.

        Raises:
            SchemaError: when a newer headrace wrote it.
        """
        for version in reversed(self._folders()):
            manifest = self._manifest(version) if among is None or version in among else None
            if manifest is not None:
                files = self._files(version, manifest)
                if files is not None:
                    return manifest.state, files
        return None

    def complete(self) -> list[int]:
        """The versions of all checkpoints that were written to the end, in order, by the names and sizes of their
        parts: only `latest_complete` and `settled` find a part that was altered later. Raises SchemaError."""
        return [version for version in self._folders() if self._is_written(version)]

    def newest_state(self) -> CheckpointState | None:
        """The state of the last of `complete`. Raises SchemaError."""
        complete = self.complete()
        manifest = self._manifest(complete[-1]) if complete else None
        return None if manifest is None else manifest.state

    def settled(self) -> int | None:
        """The version of `latest_complete`, with no more than a piece of a part in memory. Raises SchemaError."""
        for version in reversed(self._folders()):
            manifest = self._manifest(version)
            if manifest is not None and all(
                self._hash(version, name) == part.sha256 for name, part in manifest.parts.items()
            ):
                return version
        return None

    def retain(self, keep: int) -> list[int]:
        """Remove all but the newest `keep` complete checkpoints, and what was left unfinished before the newest one.

        The last complete one always stays, and so does what is newer: it may be under way. Call this when the newest
        is settled in the ledger: a learner that was fenced off never gets there. Returns what was removed.
        """
        complete = self.complete()
        if not complete:
            return []
        kept = set(complete[-max(keep, 1) :])
        removed = [version for version in self._folders() if version < complete[-1] and version not in kept]
        for version in removed:
            with suppress(FileNotFoundError):
                self._fs.rm(self._folder(version), recursive=True)
        return removed

    def _folders(self) -> list[int]:
        self._fs.invalidate_cache()
        try:
            paths = self._fs.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        names = (str(path).rstrip("/").rsplit("/", 1)[-1] for path in paths)
        return sorted(int(name) for name in names if _FOLDER.fullmatch(name))

    def _manifest(self, version: int) -> CheckpointManifest | None:
        try:
            data = self._fs.cat_file(f"{self._folder(version)}/{MANIFEST}")
            schema = msgspec.json.decode(data)["schema_version"]
            if schema != SCHEMA_VERSION:
                raise SchemaError(f"checkpoint {version} has schema {schema}; this build reads {SCHEMA_VERSION}")
            return msgspec.json.decode(data, type=CheckpointManifest)
        except (FileNotFoundError, msgspec.DecodeError, KeyError, TypeError):
            return None

    def _files(self, version: int, manifest: CheckpointManifest) -> dict[str, bytes] | None:
        """The parts, or None when one is missing or not as the manifest says."""
        files = {}
        for name, part in manifest.parts.items():
            try:
                data = bytes(self._fs.cat_file(f"{self._folder(version)}/{name}"))
            except FileNotFoundError:
                return None
            if part != Part(len(data), hashlib.sha256(data).hexdigest()):
                return None
            files[name] = data
        return files

    def _is_written(self, version: int) -> bool:
        manifest = self._manifest(version)
        if manifest is None:
            return False
        entries = self._fs.ls(self._folder(version), detail=True)
        sizes = {str(entry["name"]).rsplit("/", 1)[-1]: entry["size"] for entry in entries}
        return all(sizes.get(name) == part.size for name, part in manifest.parts.items())

    def _hash(self, version: int, name: str) -> str:
        """sha256 of a part; empty when it is missing."""
        digest = hashlib.sha256()
        try:
            with self._fs.open(f"{self._folder(version)}/{name}", "rb") as file:
                while piece := file.read(_PIECE_BYTES):
                    digest.update(piece)
        except FileNotFoundError:
            return ""
        return digest.hexdigest()

    def _folder(self, version: int) -> str:
        return f"{self._root}/{version:06d}"

    def _put(self, path: str, data: bytes) -> None:
        if not is_local(self._fs):
            put(self._fs, path, data)
            return
        with self._fs.open(path, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
