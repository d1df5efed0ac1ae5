"""Records to msgpack and back, with schema versions.

A reader takes the current schema and the one before; an upgrader turns the older one, as plain data, into the newer.
Anything else is refused by name: a record that is not understood is never guessed at.
"""

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import msgspec

from headrace.platform.errors import SchemaError
from headrace.platform.records.arrays import enc_hook, ext_hook
from headrace.platform.records.episode import SCHEMA_VERSION, Episode

R = TypeVar("R", bound=msgspec.Struct)
Upgrader = Callable[[dict[str, Any]], dict[str, Any]]

_encoder = msgspec.msgpack.Encoder(enc_hook=enc_hook)


class _Header(msgspec.Struct):
    schema_version: int = 1


class RecordCodec(Generic[R]):
    """Encode and decode one record type.

    Args:
        record: the Struct to read and write.
        current: the schema version that this build writes.
        upgraders: for schema N-1, a function from its plain data to that of N.
    """

    def __init__(self, record: type[R], current: int, upgraders: Mapping[int, Upgrader] | None = None) -> None:
        self._record = record
        self._current = current
        self._upgraders = dict(upgraders or {})
        self._decoder = msgspec.msgpack.Decoder(record, ext_hook=ext_hook)
        self._header = msgspec.msgpack.Decoder(_Header, ext_hook=ext_hook)
        self._opening = msgspec.msgpack.encode("schema_version") + msgspec.msgpack.encode(current)
        self._plain = msgspec.msgpack.Decoder(dict[str, Any], ext_hook=ext_hook)

    def encode(self, record: R) -> bytes:
        """`record` as msgpack; arrays travel as raw bytes."""
        return _encoder.encode(record)

    def decode(self, data: bytes | memoryview) -> R:
        """The record in `data`; its arrays are read-only views of `data`.

        Raises:
            SchemaError: when the schema is newer than this build, older than its upgraders reach, or the data is not
                this record.
        """
        try:
            if self._opens_as_current(data):
                return self._decoder.decode(data)
            version = self._header.decode(data).schema_version
            if version == self._current:
                return self._decoder.decode(data)
            if version not in self._upgraders:
                raise SchemaError(
                    f"{self._record.__name__} has schema {version}; this build reads {self._current}"
                    f" and {sorted(self._upgraders)}. Use the headrace that wrote it, or a newer one."
                )
            plain = self._upgraders[version](self._plain.decode(data))
            return msgspec.convert(plain, self._record)
        except (msgspec.DecodeError, ValueError) as error:
            if isinstance(error, SchemaError):
                raise
            raise SchemaError(f"not a {self._record.__name__}: {error}") from error

    def _opens_as_current(self, data: bytes | memoryview) -> bool:
        """Whether the first field says so, as in all that `encode` wrote: it spares a second pass over the message."""
        size = len(self._opening)
        head = bytes(data[: 3 + size])  # a map begins with one byte or, from 16 fields on, with three
        return head[1 : 1 + size] == self._opening or head[3:] == self._opening


episode_codec: RecordCodec[Episode] = RecordCodec(Episode, SCHEMA_VERSION)
