"""Files on any fsspec URL: whole or not at all, and lines that are only ever added.

On a local disk a file is written beside its place, made durable, and renamed. On an object store a put is atomic by
itself. A path given to these functions is one of the file system, as `open_url` returns it.
"""

import os
import secrets
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem


def open_url(url: str) -> tuple[Any, str]:
    """The file system of `url` and the path in it, without a slash at the end."""
    fs, path = fsspec.core.url_to_fs(url)
    return fs, str(path).rstrip("/")


def is_local(fs: Any) -> bool:
    """Whether paths of `fs` are files of this host."""
    return isinstance(fs, LocalFileSystem)


def write_atomic(fs: Any, path: str, data: bytes) -> None:
    """Write `data` so that a reader, or a crash at any moment, sees the whole file or none."""
    if not is_local(fs):
        fs.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
        fs.pipe_file(path, data)
        return
    target = Path(path)
    folder_is_new = not target.parent.is_dir()
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with beside.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)
    _sync_folder(target.parent)
    if folder_is_new:
        _sync_folder(target.parent.parent)


def append_lines(fs: Any, path: str, lines: bytes, durable: bool = False) -> None:
    """Add whole `lines`, which end in a newline, in one write.

    A file that an earlier crash left without a final newline gets one first, so that only its torn line is lost.
    `durable` waits for the disk.
    """
    fs.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
    if _is_torn(fs, path):
        lines = b"\n" + lines
    with fs.open(path, "ab") as file:
        file.write(lines)
        if durable and is_local(fs):
            file.flush()
            os.fsync(file.fileno())


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
