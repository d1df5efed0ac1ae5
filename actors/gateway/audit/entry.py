"""One line of an audit chain: what was asked, by whom, and what the gateway said. Hashes only, never what they are of.

A chain is a file `CHAIN.jsonl` of one life of a gateway process. Its first line is a `Header` and counts as entry 0;
line n is entry n. Each line holds the SHA-256 of the line before, as it stands there without its newline, so that
nothing can be changed, taken out or put in without changing every later hash. What an episode keeps, its head, is
CHAIN:NUMBER:HASH: the hash of line NUMBER.
"""

import hashlib
from typing import Literal

import msgspec

SCHEMA_VERSION = 1

Kind = Literal["decision", "intent", "result", "open", "close", "recorded"]


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of a chain. `host` and `build` say where and by what it was written; times are epoch seconds."""

    chain: str
    schema_version: int = SCHEMA_VERSION
    began_s: float
    host: str
    build: str


class Entry(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One entry. `previous` is the hash of the line before.

    `kind` is "open" or "close" of a session, the "decision" on a call (each has exactly one), the "intent" that is
    durable before an effect, the "result" after it (P25), or "recorded": a replay took the call from the record.
    `scope` is the session's, EPISODE/BRANCH#NONCE; `key` the call's, TURN/INDEX. `name` is the tool's, `caller` who
    asked. The hashes are keyed (`AuditLog.digest`).
    """

    number: int
    time_s: float
    chain: str
    kind: Kind
    previous: str
    scope: str = ""
    key: str = ""
    name: str = ""
    caller: str = ""
    decision: str = ""
    rule: str = ""
    tier: str = ""
    capability: str = ""
    taint: tuple[str, ...] = ()
    arguments_hash: str = ""
    result_hash: str = ""
    cost: float = 0.0

    @property
    def episode(self) -> str:
        """The id of the episode that it is of."""
        return self.scope.rpartition("/")[0]


class Head(msgspec.Struct, frozen=True):
    """The place in a chain that an episode names."""

    chain: str
    number: int
    hash: str

    @classmethod
    def parse(cls, text: str) -> "Head":
        """Read CHAIN:NUMBER:HASH. Raises ValueError."""
        chain, _, rest = text.partition(":")
        number, _, line_hash = rest.partition(":")
        if not chain or not number.isascii() or not number.isdigit() or not line_hash:
            raise ValueError(f"{text!r} is no head of an audit chain: CHAIN:NUMBER:HASH")
        return cls(chain, int(number), line_hash)

    def __str__(self) -> str:
        return f"{self.chain}:{self.number}:{self.hash}"


def line_hash(line: bytes) -> str:
    """The hash of a line, without its newline."""
    return hashlib.sha256(line).hexdigest()
