"""Rows of data, held compactly: one buffer of JSON and a few arrays, however many rows there are.

Memory: the size of the rows as JSON without spaces, and about 40 bytes a row. Nothing is copied per epoch or split;
a row is decoded when its task is played.
"""

import bisect
import hashlib
import re
from array import array
from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.actors.tasks.values import plain
from headrace.platform.errors import ConfigError
from headrace.platform.seeding import FIRST_SPLIT_SEED

DIGEST_BYTES = 16
_NO_SEED = -1
_LONG_NUMBER = re.compile(rb"\d{19}")
_encoder = msgspec.json.Encoder(order="deterministic")


def content_digest(row: Mapping[str, Any]) -> bytes:
    """A hash of a plain row without its `id`: equal for two rows that are the same task."""
    return _digest(_encoder.encode({key: value for key, value in row.items() if key != "id"}))


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


class Rows:
    """Rows in the order in which they were read. Not changed once whoever reads them has returned them.

    `repeated` counts rows without an id that were left out because they were there already.
    """

    def __init__(self) -> None:
        self._data = bytearray()
        self._ends = array("Q")
        self._digests = bytearray()
        self._lines = array("Q")
        self._seeds = array("q")
        self._files: list[str] = []
        self._first_rows: list[int] = []  # of each file
        self._seen: dict[bytes | str, int] = {}
        self.repeated = 0

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> dict[str, Any]:
        start = self._ends[index - 1] if index else 0
        row: dict[str, Any] = msgspec.json.decode(memoryview(self._data)[start : self._ends[index]])
        return row

    @property
    def digests(self) -> bytearray:
        """All digests, one after the other."""
        return self._digests

    def digest(self, index: int) -> bytes:
        """`content_digest` of the row."""
        return bytes(self._digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES])

    def seed(self, index: int) -> int | None:
        """The row's own seed, where it has a column `seed`."""
        seed = self._seeds[index]
        return None if seed == _NO_SEED else seed

    def where(self, index: int) -> str:
        """`FILE:ROW`, counted from 1."""
        return f"{self._files[bisect.bisect_right(self._first_rows, index) - 1]}:{self._lines[index]}"

    def begin(self, file: str) -> None:
        """The rows added from now on are of `file`."""
        self._files.append(file)
        self._first_rows.append(len(self))

    def add(self, row: object, line: int, *, is_plain: bool = False) -> None:
        """Take up a row of the present file; `is_plain` spares what came out of a JSON decoder the check of its values.

        Raises:
            ConfigError: when it is no JSON object, cannot be one, or has an id or a seed that cannot be used.
        """
        where = f"{self._files[-1]}:{line}"
        if not isinstance(row, Mapping):
            raise ConfigError(f"{where}: not a JSON object")
        try:
            encoded = _encoder.encode(row) if is_plain else b""
            # A decoder gives whole numbers of any length, which records cannot carry.
            data = dict(row) if is_plain and not _LONG_NUMBER.search(encoded) else plain(row)
            encoded = encoded or _encoder.encode(data)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None
        digest = content_digest(data) if "id" in data else _digest(encoded)
        name: bytes | str = checked_id(data["id"], where) if "id" in data else digest
        if name in self._seen:
            if isinstance(name, str):
                raise ConfigError(f"{where}: the id {name!r} is that of {self.where(self._seen[name])} too")
            self.repeated += 1
            return
        seed = _checked_seed(data["seed"], where) if data.get("seed") is not None else _NO_SEED
        self._seen[name] = len(self)
        self._data += encoded
        self._ends.append(len(self._data))
        self._digests += digest
        self._lines.append(line)
        self._seeds.append(seed)

    def close(self) -> "Rows":
        """Forget what only `add` needs."""
        self._seen = {}
        return self


def checked_id(value: object, where: str) -> str:
    """A row's `id` as text. Raises ConfigError for what is neither text nor a whole number."""
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise ConfigError(f"{where}: the id is {value!r}; give each row a text or a number of its own, or no `id`")
    return str(value)


def _checked_seed(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < FIRST_SPLIT_SEED:
        raise ConfigError(f"{where}: the seed is {value!r}; it must be a whole number from 0 to 2**61 - 1")
    return value
