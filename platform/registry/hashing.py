"""Names and hashes of a version's files: one definition for writers and readers."""

import hashlib
from collections.abc import Mapping

from headrace.platform.errors import RegistryError


def file_hash(data: bytes) -> str:
    """SHA-256 of a file's bytes, as hex."""
    return hashlib.sha256(data).hexdigest()


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
