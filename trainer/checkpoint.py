"""Complete checkpoints on any fsspec URL: written part by part, the manifest last.

A checkpoint is the folder `NNNNNN/` of the version that it settles (P5). It exists when its manifest can be read and
every part that the manifest lists is there with its hash; anything else is an unfinished write, which readers pass
over (case Q16). Nothing is renamed, so object stores serve as well as disks. On a local disk every part is durable
before the manifest is begun. What the parts mean is the backend's business.
"""

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec
import msgspec

from headrace.platform.errors import SchemaError

MANIFEST = "manifest.json"
SCHEMA_VERSION = 1
_FOLDER = re.compile(r"\d{6,}")


class CheckpointState(msgspec.Struct, frozen=True, kw_only=True):
    """What the learner itself needs to go on: its steps, the version's hash and B(version) of P14, and the dispatch
    sequence at that time, which is the position in the data."""

    version: int
    content_hash: str
    batches: int
    steps: int
    dispatch_sequence: int


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
        fs, root = fsspec.core.url_to_fs(root_url)
        self._fs: Any = fs
        self._root = str(root).rstrip("/")

    def write(self, state: CheckpointState, files: Mapping[str, bytes]) -> None:
        """Write the checkpoint of `state.version`; it exists once this returns, and not before the last write."""
        folder = self._folder(state.version)
        self._fs.makedirs(folder, exist_ok=True)
        parts = {}
        for name, data in files.items():
            self._put(f"{folder}/{name}", data)
            parts[name] = Part(len(data), hashlib.sha256(data).hexdigest())
        manifest = CheckpointManifest(state=state, parts=parts)
        self._put(f"{folder}/{MANIFEST}", msgspec.json.format(msgspec.json.encode(manifest)))
        if _is_local(self._fs):
            _sync_folder(Path(folder))
            _sync_folder(Path(self._root))

    def latest_complete(self) -> tuple[CheckpointState, dict[str, bytes]] | None:
        """State and files of the newest checkpoint that is whole, or None when there is none.

        Raises:
            SchemaError: when a newer headrace wrote it.
        """
        if not self._fs.exists(self._root):
            return None
        names = (str(path).rstrip("/").rsplit("/", 1)[-1] for path in self._fs.ls(self._root, detail=False))
        for version in sorted((int(name) for name in names if _FOLDER.fullmatch(name)), reverse=True):
            found = self._read(version)
            if found is not None:
                return found
        return None

    def _read(self, version: int) -> tuple[CheckpointState, dict[str, bytes]] | None:
        folder = self._folder(version)
        try:
            data = self._fs.cat_file(f"{folder}/{MANIFEST}")
            schema = msgspec.json.decode(data)["schema_version"]
            if schema != SCHEMA_VERSION:
                raise SchemaError(f"checkpoint {version} has schema {schema}; this build reads {SCHEMA_VERSION}")
            manifest = msgspec.json.decode(data, type=CheckpointManifest)
            files = {name: bytes(self._fs.cat_file(f"{folder}/{name}")) for name in manifest.parts}
        except (FileNotFoundError, msgspec.DecodeError, KeyError, TypeError):
            return None
        whole = all(manifest.parts[n] == Part(len(d), hashlib.sha256(d).hexdigest()) for n, d in files.items())
        return (manifest.state, files) if whole else None

    def _folder(self, version: int) -> str:
        return f"{self._root}/{version:06d}"

    def _put(self, path: str, data: bytes) -> None:
        with self._fs.open(path, "wb") as file:
            file.write(data)
            if _is_local(self._fs):
                file.flush()
                os.fsync(file.fileno())


def _is_local(fs: Any) -> bool:
    return "file" in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
