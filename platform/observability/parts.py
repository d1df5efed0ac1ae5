"""What each process of a run is doing, and what it waits for: small files in the run root, for `headrace status`.

A part says what it does as it does it, which costs an assignment; a thread writes the last word to `status/PART.json`
when it has changed, and now and then when it has not, so that readers see who has fallen silent. Fails open: a status
that cannot be written stops nothing (it is a metric).
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import msgspec

from headrace.platform.store.files import is_local, open_url, write_atomic

_log = logging.getLogger(__name__)
FOLDER = "status"
WRITE_EVERY_S = 1.0
ALIVE_EVERY_S = 5.0
"""Also how often at most a part writes to a root that is not local: every word is a request there."""
SILENT_AFTER_S = 3 * ALIVE_EVERY_S
"""A part that has written nothing for so long is gone, or stuck beyond speech."""


class PartStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The last word of a part. `since_s` is when `state` began, `updated_s` when this was written, both in seconds
    since the epoch; `waiting_for` is empty for a part that works. `detail` are figures for people."""

    part: str
    pid: int
    host: str
    state: str
    waiting_for: str
    since_s: float
    updated_s: float
    detail: dict[str, str | int | float] = {}

    def is_silent(self, now_s: float) -> bool:
        """Whether it has not written for so long that it must be gone or stuck."""
        return now_s - self.updated_s > SILENT_AFTER_S


class Part:
    """One process's own status. Any thread may set it; `start` begins to write it down."""

    def __init__(self, root_url: str, name: str) -> None:
        self._fs, root = open_url(root_url)
        self._path = f"{root}/{FOLDER}/{name}.json"
        self._every_s = WRITE_EVERY_S if is_local(self._fs) else ALIVE_EVERY_S
        self._name = name
        self._now = ("starting", "", time.time())
        self._detail: Mapping[str, str | int | float] = {}
        self._trouble = ""
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def set(self, state: str, waiting_for: str = "") -> None:
        """From now on the part does `state`, or waits for something. The same again does not restart the time."""
        if (state, waiting_for) != self._now[:2]:
            self._now = (state, waiting_for, time.time())

    def note(self, **detail: str | int | float) -> None:
        """Figures beside the state."""
        self._detail = {**self._detail, **detail}

    @contextmanager
    def waiting(self, waiting_for: str) -> Iterator[None]:
        """The part waits while the block runs; afterwards it does again what it did before."""
        state, waited_for, _ = self._now
        self.set(state, waiting_for)
        try:
            yield
        finally:
            self.set(state, waited_for)

    def start(self) -> None:
        """Write the status down from now on."""
        self._thread = threading.Thread(target=self._write_regularly, name=f"status of {self._name}", daemon=True)
        self._thread.start()

    def close(self, state: str = "ended") -> None:
        """Write the last word. Safe to call twice, and without `start`."""
        if self._thread is not None:
            self.set(state)
            self._ended.set()
            self._thread.join()
            self._thread = None

    def status(self) -> PartStatus:
        """The status as of now."""
        state, waiting_for, since_s = self._now
        return PartStatus(
            part=self._name,
            pid=os.getpid(),
            host=socket.gethostname(),
            state=state,
            waiting_for=waiting_for,
            since_s=since_s,
            updated_s=time.time(),
            detail=dict(self._detail),
        )

    def _write_regularly(self) -> None:
        written: tuple[object, ...] | None = None
        at_s = 0.0
        while True:
            ended = self._ended.wait(self._every_s if written else 0.0)
            now = (*self._now, dict(self._detail))
            if ended or now != written or time.monotonic() - at_s >= ALIVE_EVERY_S:
                self._write()
                written, at_s = now, time.monotonic()
            if ended:
                return

    def _write(self) -> None:
        try:
            write_atomic(self._fs, self._path, msgspec.json.encode(self.status()), durable=False)
            self._trouble = ""
        except Exception as error:  # fails open: a status that cannot be written stops nothing
            if str(error) != self._trouble:  # once, not every second
                _log.warning("the status of %s could not be written: %s", self._name, error)
            self._trouble = str(error)


def read_parts(root_url: str) -> list[PartStatus]:
    """The last word of every part, by name. What cannot be read is left out."""
    fs, root = open_url(root_url)
    fs.invalidate_cache()
    found = []
    for file in sorted(fs.glob(f"{root}/{FOLDER}/*.json")):
        try:
            found.append(msgspec.json.decode(fs.cat_file(file), type=PartStatus))
        except (FileNotFoundError, msgspec.DecodeError):
            continue
    return found
