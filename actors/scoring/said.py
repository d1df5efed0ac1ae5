"""What a scorer's process prints, its complaints included: read always, so that it never blocks on a full pipe.

Each line goes to the log, up to a limit for each process, for a reward may print at every episode of a long run. The
tail is kept, to say what a process that died said last.
"""

import asyncio
import logging
import os
from contextlib import suppress

_log = logging.getLogger(__name__)
_TAIL_BYTES = 2000
_MOST_LINES = 1000
_LINE_CHARS = 500


class Said(asyncio.Protocol):
    """Reads one end of a pipe.

    Args:
        name: what the log calls the scorer.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tail = b""
        self._line = b""
        self._lines = 0
        self._transport: asyncio.ReadTransport | None = None
        self._ended = asyncio.Event()

    async def open(self) -> int:
        """Begin to read. Returns the file descriptor to write to; the caller closes its own copy."""
        reads, writes = os.pipe()
        self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: self, os.fdopen(reads, "rb", 0))
        return writes

    async def close(self, wait_s: float) -> None:
        """Read what is still coming, but no longer than `wait_s`, whoever may hold the other end then."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._ended.wait()
        if self._transport is not None:
            self._transport.close()

    def tail(self) -> str:
        """The last lines, on one line."""
        lines = self._tail.decode(errors="replace").splitlines()
        return " | ".join(line.strip() for line in lines if line.strip())

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        *lines, rest = (self._line + data).split(b"\n")
        for line in lines:
            self._write(line)
        self._line = rest[: 4 * _LINE_CHARS]

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._write(self._line)
        self._line = b""
        self._ended.set()

    def _write(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if not text or self._lines > _MOST_LINES:
            return
        self._lines += 1
        if self._lines > _MOST_LINES:
            text = f"(it printed {_MOST_LINES} lines; this process's further ones are not logged)"
        _log.info("scorer %s: %s", self._name, text[:_LINE_CHARS])
