"""The registry: a JSON file with a list of addresses, in which hosts write themselves and from which pools read.

Writers take turns by a lock beside the file and replace it as a whole, so that a reader never sees half of it. A host
that is killed leaves its address behind; pools find out and avoid it.
"""

import errno
import fcntl
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from headrace.platform.errors import ConfigError


def read_registry(file: Path) -> list[str]:
    """The addresses in it, each once. Raises OSError and ConfigError."""
    try:
        value = json.loads(file.read_text(encoding="utf-8") or "[]")
    except ValueError as error:
        raise ConfigError(f"{file} is no JSON: {error}") from None
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ConfigError(f'{file} must hold a list of addresses, such as ["ws://10.0.0.7:8700"]')
    return list(dict.fromkeys(value))


def check_registry(file: Path) -> None:
    """Make sure that hosts can write themselves into it; makes the file if need be. Raises OSError and ConfigError."""
    _change(file, lambda known: known)


def join_registry(file: Path, address: str) -> None:
    """Add an address; makes the file if need be. Raises OSError and ConfigError."""
    _change(file, lambda known: [*(each for each in known if each != address), address])


def leave_registry(file: Path, address: str) -> None:
    """Take an address out. Raises OSError and ConfigError."""
    _change(file, lambda known: [each for each in known if each != address])


def _change(file: Path, change: Callable[[list[str]], list[str]]) -> None:
    if file.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_name(f"{file.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = read_registry(file) if file.exists() else []
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=f"{file.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as fresh:
                fresh.write(json.dumps(change(known), indent=1) + "\n")
            Path(name).chmod(0o644)
            Path(name).replace(file)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
