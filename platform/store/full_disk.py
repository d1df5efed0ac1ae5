"""A full disk by name (P23): whoever writes what must be durable does so under `named_when_full`."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from headrace.platform.errors import DiskFull

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def named_when_full(where: str | os.PathLike[str]) -> Iterator[None]:
    """The block writes below `where`. Raises DiskFull instead of the OSError of a full disk or quota."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise DiskFull(f"the disk of {os.fspath(where)} is full ({_free(Path(where))}): {error}") from error


def _free(folder: Path) -> str:
    """What is left; a quota, or a file system without free inodes, is full with bytes left."""
    try:
        return f"{shutil.disk_usage(folder).free} bytes free"
    except OSError:
        return "its free space cannot be told"
