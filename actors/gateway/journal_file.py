"""The journal's file format, and one such file: frames that are appended, read back by place, and tried on start.

A frame is a 4-byte length and a CRC-32 (big-endian), then the bytes. A crash may tear the last frames of a file:
reading ends at the first that is not whole.
"""

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from struct import Struct

from headrace.actors.gateway.group_writer import GroupWriter

_FRAME = Struct(">II")
OVERHEAD = _FRAME.size


class JournalFile:
    """One file. Without a `writer` it is there already and no more is added."""

    def __init__(self, path: Path, writer: GroupWriter | None = None) -> None:
        self.path, self.writer = path, writer
        self._reader = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._reader).st_size

    def append(self, data: bytes) -> tuple[int, int]:
        """Add a frame; its number as of the writer, and where it begins. Raises OSError."""
        if self.writer is None:
            raise OSError(f"{self.path.name} is read only")
        place = self.size
        number = self.writer.append(_FRAME.pack(len(data), zlib.crc32(data)) + data)
        self.size = place + OVERHEAD + len(data)
        return number, place

    def holds(self, number: int) -> bool:
        """Whether the frame of this number is on disk."""
        return self.writer is None or number <= self.writer.synced[0]

    def read(self, place: int) -> bytes:
        """The frame that begins at `place`, and is on disk. Raises OSError where it is not whole."""
        head = os.pread(self._reader, OVERHEAD, place)
        if len(head) == OVERHEAD:
            length, check = _FRAME.unpack(head)
            data = os.pread(self._reader, length, place + OVERHEAD)
            if len(data) == length and zlib.crc32(data) == check:
                return data
        raise OSError(f"{self.path.name} does not hold what was written at byte {place}")

    def frames(self) -> Iterator[tuple[int, bytes]]:
        """The whole frames with their places, up to the first torn one. All of the file is read at once."""
        whole, place = self.path.read_bytes(), 0
        while place + OVERHEAD <= len(whole):
            length, check = _FRAME.unpack_from(whole, place)
            data = whole[place + OVERHEAD : place + OVERHEAD + length]
            if len(data) != length or zlib.crc32(data) != check:
                return
            yield place, data
            place += OVERHEAD + length

    def finish(self) -> None:
        """Bring everything to disk; no more is added. Raises OSError where something is not."""
        if self.writer is not None:
            self.writer.close()

    def close(self) -> None:
        """Let go of the file, which can then not be read either."""
        os.close(self._reader)
