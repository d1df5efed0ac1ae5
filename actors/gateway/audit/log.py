"""The audit log of one life of a gateway process: append-only, hash-chained, committed in groups.

Owns the file of its chain (`entry.py` says what is in it) and the key of its hashes. The order of entries is that of
the decisions. A head is only ever given out for what is on disk, so that a crash makes no episode name what is not
there. A failed write ends the log: everybody who waits and every later `append` gets the error, and the gateway has to
deny. When to wait is the caller's to say: before the effect and before the answer of a call that is more than a read
(P25), and before a head goes into an episode.
"""

import asyncio
import hashlib
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from headrace import __version__
from headrace.actors.gateway.audit.entry import Entry, Head, Header, Kind, line_hash
from headrace.actors.gateway.group_writer import GroupWriter

_MAX_TEXT = 200
_NO_HOST_CHARACTERS = re.compile(r"[^A-Za-z0-9-]+")
_WEB_SOURCE = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)(?:[^/?#@\s]*@)?([^/?#\s]*)\S*")

_encode = msgspec.json.Encoder().encode
_encode_sorted = msgspec.json.Encoder(order="deterministic").encode


class AuditLog:
    """One chain in `folder`, begun now.

    Args:
        folder: of all chains of a run; made where it is missing.
        flush_s: seconds until an entry that nobody waits for is on disk.
        home: where the key of the hashes is kept (`salts/CHAIN`); None: nowhere, and nobody can ever say what a hash
            is of.
        sync: see `GroupWriter`.

    Raises:
        OSError: nothing can be written there.
    """

    def __init__(
        self, folder: Path, flush_s: float, home: Path | None = None, sync: Callable[[int], None] = os.fdatasync
    ) -> None:
        host = _NO_HOST_CHARACTERS.sub("-", socket.gethostname())[:32].strip("-") or "host"
        began_s = time.time()
        self.chain = f"{host}-{int(began_s)}-{secrets.token_hex(4)}"
        salt = secrets.token_bytes(64)  # a whole block of SHA-256
        if home is not None:
            _keep(home / "salts" / self.chain, salt)
        self._salted = hashlib.sha256(salt)
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = GroupWriter(folder / f"{self.chain}.jsonl", flush_s, mode=0o644, sync=sync)
        header = Header(chain=self.chain, began_s=began_s, host=host, build=__version__)
        self._number = 0
        self._previous = self._write(_encode(header))

    @property
    def path(self) -> Path:
        """The chain's file."""
        return self._writer.path

    @property
    def failure(self) -> OSError | None:
        """What ended the log; None as long as it goes well."""
        return self._writer.failure

    @property
    def head(self) -> str:
        """CHAIN:NUMBER:HASH of the last entry that is on disk, empty where none is. To name an entry of an episode,
        wait for it first."""
        appended, mark = self._writer.synced
        return str(Head(self.chain, appended - 1, mark)) if appended else ""

    def append(
        self,
        kind: Kind,
        scope: str,
        key: str = "",
        name: str = "",
        *,
        caller: str = "",
        decision: str = "",
        rule: str = "",
        tier: str = "",
        capability: str = "",
        taint: tuple[str, ...] = (),
        arguments_hash: str = "",
        result_hash: str = "",
        cost: float = 0.0,
    ) -> int:
        """Add an entry; its number. See `Entry` for the fields.

        `name` is text of the model where it named no tool that exists: leave it out then. Of a source that is a URL
        only scheme and host are kept, as paths and queries hold secrets.

        Raises:
            OSError: the log has failed or is closed. Nothing may be allowed that is not in it.
        """
        number = self._number + 1
        entry = Entry(
            number,
            time.time(),
            self.chain,
            kind,
            self._previous,
            scope,
            key,
            name,
            caller,
            decision,
            rule,
            tier,
            capability,
            _shown(taint) if taint else taint,
            arguments_hash,
            result_hash,
            cost,
        )
        self._previous = self._write(_encode(entry))
        self._number = number
        return number

    def durable(self, number: int | None = None) -> asyncio.Future[None]:
        """Asks for entry `number`, or all that there is, to be on disk, at once; await it. Raises OSError when it is
        not on disk and never will be."""
        return self._writer.durable((self._number if number is None else number) + 1)

    def digest(self, value: Any) -> str:
        """The hash of arguments or of a result: SHA-256 of this chain's key and of the value as canonical JSON.

        Without the key, which is not in the log, a short secret cannot be found by trying.
        """
        try:
            data = _encode_sorted(value)
        except UnicodeEncodeError:  # half of a surrogate pair, which JSON may spell and UTF-8 may not
            data = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
        hashed = self._salted.copy()
        hashed.update(data)
        return hashed.hexdigest()

    def close(self) -> None:
        """Bring everything to disk. Safe to call twice. Raises OSError where something is not."""
        self._writer.close()

    def _write(self, line: bytes) -> str:
        mark = line_hash(line)
        self._writer.append(line + b"\n", mark)
        return mark


def _shown(sources: tuple[str, ...]) -> tuple[str, ...]:
    return tuple([_WEB_SOURCE.sub(r"\1\2", source)[:_MAX_TEXT] for source in sources])


def _keep(path: Path, salt: bytes) -> None:
    """Write a new file that its owner alone can read."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(file, salt)
        os.fsync(file)
    finally:
        os.close(file)
