"""Files on any fsspec URL, whole or not at all.

On a local disk a file is written beside its place, made durable, and renamed. On an object store a put is atomic by
itself. A path given to these functions is one of the file system, as `open_url` returns it. A full local disk is raised
as DiskFull (P23). Lines that are only ever added are `lines.py`.
"""

import os
import secrets
from io import RawIOBase
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from headrace.platform.errors import ConfigError
from headrace.platform.store.full_disk import named_when_full

_S3 = ("s3", "s3a")


def open_url(url: str) -> tuple[Any, str]:
    """The file system of `url` and the path in it, without a slash at the end.

    Raises:
        ConfigError: nothing that is installed reads such URLs; the message says what to install.
    """
    try:
        fs, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        needed = "run: pip install 'headrace[s3]'" if url.partition("://")[0] in _S3 else str(error)
        raise ConfigError(f"{url} cannot be opened, as a package is missing; {needed}") from error
    except ValueError as error:
        raise ConfigError(f"{url} is no URL that can be opened: {error}") from error
    return fs, str(path).rstrip("/")


def is_local(fs: Any) -> bool:
    """Whether paths of `fs` are files of this host."""
    return isinstance(fs, LocalFileSystem)


def write_atomic(fs: Any, path: str, data: bytes, durable: bool = True) -> None:
    """Write `data` so that a reader, or a crash at any moment, sees the whole file or none. Without `durable` it does
    not wait for the disk. Raises DiskFull."""
    if not is_local(fs):
        put(fs, path, data)
        return
    target = Path(path)
    with named_when_full(target.parent):
        folder_is_new = not target.parent.is_dir()
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
        try:
            with beside.open("xb") as file:
                file.write(data)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)
        if not durable:
            return
        _sync_folder(target.parent)
        if folder_is_new:
            _sync_folder(target.parent.parent)


def put(fs: Any, path: str, data: bytes, **how: Any) -> None:
    """Write a file of a file system that is not local. Object stores have no folders, so one is made only where the
    file system misses it: looking for it would be a request per write."""
    try:
        fs.pipe_file(path, data, **how)
    except FileNotFoundError:
        fs.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
        fs.pipe_file(path, data, **how)


def append_lines(fs: Any, path: str, lines: bytes, durable: bool = False) -> None:
    """Add whole `lines`, which end in a newline, to a file of a local disk, in one write. Raises DiskFull.

    A file that an earlier crash left without a final newline gets one first, so that only its torn line is lost. What
    failed leaves the file as it was, so that it may be tried again. `durable` waits for the disk.
    """
    file = Path(path)
    with named_when_full(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
        if _is_torn(fs, path):
            lines = b"\n" + lines
        with file.open("ab", buffering=0) as opened:
            before = opened.tell()
            try:
                write_all(opened, lines)
                if durable:
                    os.fsync(opened.fileno())
            except OSError:
                os.ftruncate(opened.fileno(), before)
                raise


def write_all(file: RawIOBase, data: bytes) -> None:
    """Write all of `data`: an unbuffered file may take a part only."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) or 0 :]


def _is_torn(fs: Any, path: str) -> bool:
    try:
        size = fs.size(path)
    except FileNotFoundError:
        return False
    return bool(size) and fs.cat_file(path, start=size - 1, end=size) != b"\n"


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
