"""Content hashes: of values, of texts, and of texts after everything accidental was taken out of them.

Two runs of one episode agree on the canonical hash of a step though a time, a process id or a temporary path differs;
the raw hash shows that something did. `NORMALISER` names the rules and is stored beside what they produced.
"""

import functools
import hashlib
import re
from typing import Any

import msgspec

from headrace.platform.records.message import HashPair

NORMALISER = "1"
# Worlds repeat themselves ("ok", "not found"), and so do the samples of a group: the hashes of texts up to this length
# are remembered, and shared.
_SHORT = 64

_encoder = msgspec.json.Encoder(order="deterministic")

_ACCIDENTAL = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?|\d\d:\d\d:\d\d(?:[.,]\d+)?)"
    r"|(?P<address>0x[0-9a-fA-F]{6,16})"
    r"|(?P<duration>\d+\.\d+ ?(?:s|ms|sec|seconds)\b)"
    r"|(?P<path>/(?:tmp|var/tmp)/[^\s'\",:;)]+)"
    r"|(?P<pid>(?:pid|PID|process)[\"']?[ =:]+\d+)"
)


def _placeholder(match: re.Match[str]) -> str:
    return f"<{match.lastgroup}>"


def canonical_text(text: str) -> str:
    """`text` with times, durations, process ids, addresses and temporary paths replaced by their kind."""
    return _ACCIDENTAL.sub(_placeholder, text) if _has_sign(text) else text


def digest(data: bytes) -> str:
    """The SHA-256 of `data` in hex."""
    return hashlib.sha256(data).hexdigest()


def digest_value(value: Any) -> str:
    """The SHA-256 of a JSON-safe value or record; the order of mapping keys does not matter."""
    return digest(_encoder.encode(value))


def hash_text(text: str) -> HashPair:
    """Raw and canonical hash of a text."""
    return _hash_short(text) if len(text) <= _SHORT else _pair(text.encode("utf-8", "replace"))


@functools.lru_cache(maxsize=8192)
def _hash_short(text: str) -> HashPair:
    return _pair(text.encode("utf-8", "replace"))


def hash_value(value: Any) -> HashPair:
    """Raw and canonical hash of a JSON-safe value or record, such as an environment's state."""
    return _pair(_encoder.encode(value))


def _pair(data: bytes) -> HashPair:
    """Raw and canonical hash of a text in UTF-8."""
    raw, text = digest(data), data.decode()
    return HashPair(raw, digest(_ACCIDENTAL.sub(_placeholder, text).encode()) if _has_sign(text) else raw)


def _has_sign(text: str) -> bool:
    """Whether anything accidental can be in `text`: seven plain searches, which spare most texts the long one."""
    return (
        ":" in text
        or "." in text
        or "0x" in text
        or "pid" in text
        or "PID" in text
        or "/tmp/" in text
        or "process" in text
    )
