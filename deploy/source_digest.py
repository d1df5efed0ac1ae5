"""The digest of headrace's own source: part of cache keys and of every episode's record."""

import functools
import hashlib
from pathlib import Path

import headrace


@functools.cache
def code_digest(*packages: str) -> str:
    """SHA-256 over the Python files of the named packages (all, when none is named), by path and content."""
    root = Path(headrace.__file__).parent
    digest = hashlib.sha256(headrace.__version__.encode())
    for package in packages or ("platform", "actors", "serving", "trainer", "deploy"):
        for file in sorted((root / package).rglob("*.py")):
            digest.update(str(file.relative_to(root)).encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()
