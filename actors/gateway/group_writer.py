"""Group commit: what is appended to a file by many goes to the disk together.

::

    append ──► batch ──► [thread: write, fdatasync] ──► whoever waits for a number that is now on disk
                 ▲                │
                 └── gathers while the disk is busy

Owns one file, which it creates, and one thread. `append` is a plain call of microseconds. The thread writes when
somebody waits, else every `flush_s`. The order in the file is that of the calls. A failed write or sync is final: what
reached the disk is then unknown, so that everybody who waits and every later `append` gets the error (fail closed).
What the bytes mean is left to the owner.
"""

import asyncio
import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

MAX_PENDING_BYTES = 64 * 1024 * 1024


class GroupWriter:
    """Appends to a new file. Its methods but `close` are safe from any thread; waiting needs a running event loop.

    Args:
        path: must not exist; its folder must.
        flush_s: seconds until what nobody waits for is on disk.
        mode: permissions of the file.
        sync: makes a descriptor's data durable.

    Raises:
        FileExistsError: the file exists.
    """

    def __init__(
        self, path: Path, flush_s: float, mode: int = 0o600, sync: Callable[[int], None] = os.fdatasync
    ) -> None:
        self.path = path
        self._flush_s, self._sync = flush_s, sync
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, mode)
        sync_folder(path.parent)
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._batch: list[bytes] = []
        self._pending_bytes = 0
        self._appended: tuple[int, str] = (0, "")
        self._synced: tuple[int, str] = (0, "")
        self._waiting: list[tuple[int, asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._failure: OSError | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"write {path.name}", daemon=True)
        self._thread.start()

    @property
    def synced(self) -> tuple[int, str]:
        """Number and mark of the last append that is on disk; (0, "") before the first."""
        return self._synced

    @property
    def failure(self) -> OSError | None:
        """What ended the writing; None as long as it goes well."""
        return self._failure

    def append(self, data: bytes, mark: str = "") -> int:
        """Add `data`; its number, counted from 1. `mark` is what `synced` says once it is on disk.

        Raises:
            OSError: an earlier write failed, the writer is closed, or the disk is so slow that too much is pending.
        """
        with self._lock:
            if self._failure is not None or self._closing:
                raise self._refusal()
            if self._pending_bytes > MAX_PENDING_BYTES:
                raise OSError(errno.EAGAIN, f"{self.path.name}: the disk does not keep up")
            self._batch.append(data)
            self._pending_bytes += len(data)
            number = self._appended[0] + 1
            self._appended = (number, mark)
        return number

    def durable(self, number: int) -> asyncio.Future[None]:
        """Asks for append `number` to be on disk, at once; done when it is. Raises OSError when that failed."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._lock:
            if number <= self._synced[0]:
                future.set_result(None)
            elif self._failure is not None:
                _fail((future,), self._refusal())
            else:
                self._waiting.append((number, loop, future))
                self._wake.set()
        return future

    def close(self) -> None:
        """Bring everything to disk and end the thread. Safe to call twice; then it raises no more.

        Raises:
            OSError: something that was appended is not on disk.
        """
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._wake.set()
        self._thread.join()
        os.close(self._file)
        if self._failure is not None:
            raise self._refusal()

    def _run(self) -> None:
        while True:
            self._wake.wait(self._flush_s)
            self._wake.clear()
            with self._lock:
                batch, self._batch = self._batch, []
                last, closing = self._appended, self._closing
            if batch:
                data = b"".join(batch)
                try:
                    _write_all(self._file, data)
                    self._sync(self._file)
                except OSError as error:
                    self._give_up(error)
                    return
                self._publish(last, len(data))
            if closing:
                return

    def _publish(self, last: tuple[int, str], size: int) -> None:
        with self._lock:
            self._synced = last
            self._pending_bytes -= size
            ready = [each for each in self._waiting if each[0] <= last[0]]
            self._waiting = [each for each in self._waiting if each[0] > last[0]]
        for loop, futures in _by_loop(ready).items():
            _tell(loop, _release, futures)

    def _give_up(self, error: OSError) -> None:
        with self._lock:
            self._failure = error
            self._batch = []
            waiting, self._waiting = self._waiting, []
        for loop, futures in _by_loop(waiting).items():
            _tell(loop, _fail, futures, self._refusal())

    def _refusal(self) -> OSError:
        if self._failure is None:
            return OSError(errno.EBADF, f"{self.path.name} is closed")
        return OSError(self._failure.errno, f"{self.path.name} could not be written: {self._failure}")


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _by_loop(
    waiting: Iterable[tuple[int, asyncio.AbstractEventLoop, asyncio.Future[None]]],
) -> dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]]:
    found: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for _, loop, future in waiting:
        found.setdefault(loop, []).append(future)
    return found


def _tell(loop: asyncio.AbstractEventLoop, what: Callable[..., None], *args: object) -> None:
    with contextlib.suppress(RuntimeError):  # the loop was closed, and with it everybody who waited there
        loop.call_soon_threadsafe(what, *args)


def _release(futures: Iterable[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


def _fail(futures: Iterable[asyncio.Future[None]], error: OSError) -> None:
    for future in futures:
        if not future.done():
            future.set_exception(error)
            future.exception()  # whoever waits for two files may see the other's failure first
