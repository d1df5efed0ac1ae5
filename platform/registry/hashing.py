"""Names and hashes of a version's files: one definition for writers and readers."""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from headrace.platform.errors import RegistryError

EPOCHS = "versions/epochs"
"""The folder of the claimed epochs, below the root."""
_MANIFEST = re.compile(r"(\d{6,})\.json")
_BLOB = re.compile(r"f(\d+)-v(\d+)")


class Blob(NamedTuple):
    """The files of version `number`, as whoever had `fence` wrote them."""

    fence: int
    number: int


def file_hash(data: bytes) -> str:
    """SHA-256 of a file's bytes, as hex."""
    return hashlib.sha256(data).hexdigest()


def file_hashes(files: Mapping[str, bytes]) -> dict[str, str]:
    """SHA-256 of each file, by name."""
    return {name: file_hash(data) for name, data in files.items()}


def local_file_hash(path: Path) -> str:
    """The same of a file on this host, which need not fit into memory. Raises FileNotFoundError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def content_hash(files: Mapping[str, str]) -> str:
    """SHA-256 over the sorted (name, file hash) pairs of a version, as hex."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{files[name]}\n".encode())
    return digest.hexdigest()


def check_file_name(name: str) -> None:
    """A version is a flat folder: its file names never lead out of it. Raises RegistryError."""
    if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise RegistryError(f"{name!r} is no plain file name; a version's folder is flat")


def blob_folder(number: int, fence: int) -> str:
    """Where a version's files lie, below the root. The path contains the fence (P7)."""
    return f"versions/f{fence:04d}-v{number:06d}"


def manifest_file(number: int) -> str:
    """Where a version's manifest lies, below the root."""
    return f"versions/{number:06d}.json"


def epoch_file(epoch: int) -> str:
    """What claims an epoch by being there, below the root."""
    return f"{EPOCHS}/{epoch:06d}"


def blob_of(name: str) -> "Blob | None":
    """Whose files lie in `versions/NAME`; None when that is no blob's folder."""
    found = _BLOB.fullmatch(name)
    return Blob(int(found[1]), int(found[2])) if found else None


def manifest_of(name: str) -> int | None:
    """The version whose manifest is `versions/NAME`; None when that is no manifest."""
    found = _MANIFEST.fullmatch(name)
    return int(found[1]) if found else None
