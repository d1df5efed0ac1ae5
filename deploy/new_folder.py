"""Folders that appear whole or not at all: what is worked on lies beside the target and is renamed at the end."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.platform.errors import ConfigError, RunFailed


def check_new_folder(target: Path) -> None:
    """Refuse a target that exists already or cannot be made, before the work for it begins. Raises ConfigError."""
    if os.path.lexists(target):
        raise ConfigError(f"{target} exists already; name a new folder")
    above = next(folder for folder in target.absolute().parents if os.path.lexists(folder))
    if not above.is_dir():
        raise ConfigError(f"{target} cannot be made: {above} is no folder")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(f"{target} cannot be made: nothing may be written in {above}")


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `target` when the block ends without an error, and else vanishes.

    Raises:
        ConfigError: see `check_new_folder`; before the block begins.
        RunFailed: `target` appeared during the work. The result is kept beside it; the message says where.
    """
    check_new_folder(target)
    with _filled(target) as working:
        yield working
        if not _take_place(working, target):
            kept = working.with_name(f"{target.name}-{working.name.removeprefix(target.name)}")
            working.rename(kept)
            raise RunFailed(f"{target} appeared while its content was being made; the result is in {kept}")


@contextmanager
def cached_folder(target: Path) -> Iterator[Path]:
    """As `new_folder`, for a target whose name says what it holds: where somebody was faster, theirs stays."""
    with _filled(target) as working:
        yield working
        _take_place(working, target)


@contextmanager
def _filled(target: Path) -> Iterator[Path]:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        working = Path(tempfile.mkdtemp(prefix=target.name, dir=target.parent))
    except OSError as error:
        raise ConfigError(f"{target} cannot be made: {error.strerror or error}") from error
    try:
        yield working
    finally:
        shutil.rmtree(working, ignore_errors=True)


def _take_place(working: Path, target: Path) -> bool:
    """Give the folder its name; False where that is taken."""
    working.chmod(0o755)
    try:
        if not os.path.lexists(target):
            working.rename(target)
            return True
    except OSError:
        if not os.path.lexists(target):
            raise
    return False
