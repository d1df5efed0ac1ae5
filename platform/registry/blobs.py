"""Durable files below one root, on any fsspec URL. Blocking; the registry calls it from a thread.

On local disk every file and folder is synced before the call returns (P8). Object stores are durable once a write
succeeds. Nothing below the root is ever renamed. The local files of a version are checked several at a time, and
without being read into memory as a whole. A full disk of a local root is raised as DiskFull (P23); copies in a node's
cache make way for one another.
"""

import logging
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO

from headrace.platform.errors import DiskFull, RegistryError
from headrace.platform.registry.hashing import file_hash, local_file_hash
from headrace.platform.store.files import is_local, open_url, put
from headrace.platform.store.full_disk import named_when_full

_log = logging.getLogger(__name__)
_AT_ONCE = 4
"""Files of a version that are checked at a time."""
_PIECE = 1 << 17
"""Bytes per write. For a longer one the kernel looks for larger blocks of memory, which virtual machines may have given
back to their host: writing weights then takes up to ten times as long."""


class BlobStore:
    """Reads and writes paths relative to `root_url`."""

    def __init__(self, root_url: str) -> None:
        self._fs, self._root = open_url(root_url)
        self.is_local = is_local(self._fs)

    def full(self, path: str) -> str:
        """The path as the file system knows it."""
        return f"{self._root}/{path}"

    def write_folder(self, path: str, files: Mapping[str, bytes]) -> None:
        """Write `files` into the folder `path`, durably. Raises DiskFull; then the folder is empty, and so bears its
        number still (P6), but takes no room."""
        if not self.is_local:
            for name, data in files.items():
                put(self._fs, f"{self.full(path)}/{name}", data)
            return
        folder = Path(self.full(path))
        try:
            with named_when_full(self._root):
                _write_folder_synced(folder, files)
        except DiskFull:
            for name in files:
                (folder / name).unlink(missing_ok=True)
            raise

    def create(self, path: str, data: bytes) -> None:
        """Write a file that must not exist yet, durably. Raises FileExistsError, or DiskFull, and then the file does
        not exist."""
        full = self.full(path)
        if self.is_local:
            with named_when_full(self._root):
                _create_synced(Path(full), data)
        elif self._fs.exists(full):
            raise FileExistsError(full)
        else:
            # Stores that can write conditionally do; for others the fence keeps a second writer away (P7).
            put(self._fs, full, data, mode="create")

    def read(self, path: str) -> bytes:
        """A file's bytes. Raises FileNotFoundError."""
        return bytes(self._fs.cat_file(self.full(path)))

    def read_many(self, paths: Sequence[str]) -> dict[str, bytes]:
        """The bytes of those of `paths` that exist; at once, where the store can."""
        full = [self.full(path) for path in paths]
        found = self._fs.cat_ranges(full, None, None, on_error="return")
        for data in found:
            if isinstance(data, Exception) and not isinstance(data, FileNotFoundError):
                raise data
        return {path: bytes(data) for path, data in zip(paths, found, strict=True) if not isinstance(data, Exception)}

    def has_folder(self, path: str) -> bool:
        """Whether there is anything in a folder, or it is an empty one."""
        self._fs.invalidate_cache()
        return bool(self._fs.isdir(self.full(path)))

    def names(self, path: str) -> list[str]:
        """The names in a folder, sorted; none when it does not exist."""
        self._fs.invalidate_cache()
        try:
            return sorted(entry.rstrip("/").rpartition("/")[2] for entry in self._fs.ls(self.full(path), detail=False))
        except FileNotFoundError:
            return []

    def remove_folder(self, path: str) -> None:
        """Remove a folder and what is in it; fine when somebody else has done so."""
        with suppress(FileNotFoundError):
            self._fs.rm(self.full(path), recursive=True)

    def verify(self, path: str, hashes: Mapping[str, str]) -> str:
        """The folder behind `path` of a local root, its files checked. Raises RegistryError naming a missing or altered
        file."""
        folder = Path(self.full(path))
        with ThreadPoolExecutor(_AT_ONCE, "verify") as pool:
            list(pool.map(_check_local, (folder / name for name in hashes), hashes.values()))
        return str(folder)

    def copy_verified(self, path: str, hashes: Mapping[str, str], cache: Path) -> str:
        """A checked copy of the folder below `cache`, made at most once per node.

        Where the disk is full, the other copies below `cache` make way: all can be had again.

        Raises:
            RegistryError: a file is missing or altered.
            DiskFull: there is no room even so.
        """
        target = cache / path
        if target.is_dir():
            if all((target / name).exists() for name in hashes) and _matches(target, hashes):
                return str(target)
            shutil.rmtree(target)
        try:
            with named_when_full(cache):
                return self._copy(path, hashes, target)
        except DiskFull as error:
            _log.warning("the copies of other versions are removed: %s", error)
            shutil.rmtree(cache, ignore_errors=True)
            with named_when_full(cache):
                return self._copy(path, hashes, target)

    def _copy(self, path: str, hashes: Mapping[str, str], target: Path) -> str:
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
        _compare(f"{self.full(path)}/{name}", file_hash(data), expected)
        return data


def _check_local(file: Path, expected: str) -> None:
    try:
        found = local_file_hash(file)
    except FileNotFoundError:
        raise RegistryError(f"{file} is missing") from None
    _compare(str(file), found, expected)


def _compare(where: str, found: str, expected: str) -> None:
    if found != expected:
        raise RegistryError(f"{where} is torn or altered: its hash is not that of the manifest")


def _matches(folder: Path, hashes: Mapping[str, str]) -> bool:
    return all(local_file_hash(folder / name) == expected for name, expected in hashes.items())


def _write_folder_synced(folder: Path, files: Mapping[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        with (folder / name).open("wb") as file:
            _write_synced(file, data)
    _sync_folder(folder)
    _sync_folder(folder.parent)


def _create_synced(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        try:
            _write_synced(file, data)
        except OSError:
            path.unlink()
            raise
    _sync_folder(path.parent)


def _write_synced(file: IO[bytes], data: bytes) -> None:
    view = memoryview(data)
    for start in range(0, len(view), _PIECE):
        file.write(view[start : start + _PIECE])
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
