"""Durable files below one root, on any fsspec URL. Blocking; the registry calls it from a thread.

On local disk every file and folder is synced before the call returns (P8). Object stores are durable once a write
succeeds. Nothing below the root is ever renamed.
"""

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from headrace.platform.errors import RegistryError
from headrace.platform.registry.hashing import file_hash


class BlobStore:
    """Reads and writes paths relative to `root_url`."""

    def __init__(self, root_url: str) -> None:
        self._fs: Any
        self._fs, self._root = fsspec.core.url_to_fs(root_url)
        self.is_local = isinstance(self._fs, LocalFileSystem)

    def full(self, path: str) -> str:
        """The path as the file system knows it."""
        return f"{self._root.rstrip('/')}/{path}"

    def write_folder(self, path: str, files: Mapping[str, bytes]) -> None:
        """Write `files` into the folder `path`, durably."""
        folder = self.full(path)
        self._fs.makedirs(folder, exist_ok=True)
        for name, data in files.items():
            if self.is_local:
                _write_synced(Path(folder, name), data, exclusive=False)
            else:
                self._fs.pipe_file(f"{folder}/{name}", data)
        if self.is_local:
            _sync_folder(Path(folder))
            _sync_folder(Path(folder).parent)

    def create(self, path: str, data: bytes) -> None:
        """Write a file that must not exist yet, durably. Raises FileExistsError."""
        full = self.full(path)
        self._fs.makedirs(full.rpartition("/")[0], exist_ok=True)
        if self.is_local:
            _write_synced(Path(full), data, exclusive=True)
            _sync_folder(Path(full).parent)
        elif self._fs.exists(full):
            raise FileExistsError(full)
        else:
            # Stores that can write conditionally do; for others the fence keeps a second writer away (P7).
            self._fs.pipe_file(full, data, mode="create")

    def read(self, path: str) -> bytes:
        """A file's bytes. Raises FileNotFoundError."""
        return bytes(self._fs.cat_file(self.full(path)))

    def names(self, path: str) -> list[str]:
        """The names in a folder, sorted; none when it does not exist."""
        self._fs.invalidate_cache()
        try:
            return sorted(entry.rstrip("/").rpartition("/")[2] for entry in self._fs.ls(self.full(path), detail=False))
        except FileNotFoundError:
            return []

    def remove_folder(self, path: str) -> None:
        """Remove a folder and what is in it."""
        self._fs.rm(self.full(path), recursive=True)

    def verify(self, path: str, hashes: Mapping[str, str]) -> str:
        """The local folder behind `path`, its files checked. Raises RegistryError naming a missing or altered file."""
        for name, expected in hashes.items():
            self._check(path, name, expected)
        return self.full(path)

    def copy_verified(self, path: str, hashes: Mapping[str, str], cache: Path) -> str:
        """A checked copy of the folder below `cache`, made at most once per node. Raises RegistryError."""
        target = cache / path
        if target.is_dir():
            if all((target / name).exists() for name in hashes) and _matches(target, hashes):
                return str(target)
            shutil.rmtree(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=target.parent))
        try:
            for name, expected in hashes.items():
                (partial / name).write_bytes(self._check(path, name, expected))
            if not target.exists():
                partial.rename(target)
        except OSError:
            # Another process of this node was faster; what it put there was checked just so.
            if not target.is_dir():
                raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return str(target)

    def _check(self, path: str, name: str, expected: str) -> bytes:
        try:
            data = self.read(f"{path}/{name}")
        except FileNotFoundError:
            raise RegistryError(f"{self.full(path)}/{name} is missing") from None
        if file_hash(data) != expected:
            raise RegistryError(f"{self.full(path)}/{name} is torn or altered: its hash is not that of the manifest")
        return data


def _matches(folder: Path, hashes: Mapping[str, str]) -> bool:
    return all(file_hash((folder / name).read_bytes()) == expected for name, expected in hashes.items())


def _write_synced(path: Path, data: bytes, *, exclusive: bool) -> None:
    with path.open("xb" if exclusive else "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
