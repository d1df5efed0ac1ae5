"""One driver at a time, in two ways: a lock of the kernel on this host, and a claim in a run root that hosts share.

The lock goes with its holder, however that dies, so a run can be resumed at once on the host where it was killed. A
claim is an object in `driver/`, created exclusively and renewed while its holder lives; one that was not renewed for
`CLAIM_TERM_S` counts as given up, so another host waits that long; on the holder's own host it is seen at once whether
the holder lives. Hosts compare their clocks here: they must agree to
within some seconds, as those of a cluster do.
"""

import fcntl
import json
import os
import socket
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import psutil

from headrace.platform.contracts import Clock
from headrace.platform.errors import RunFailed
from headrace.platform.store.files import open_url

CLAIM_TERM_S = 30.0
_FILE = "driver.lock"
_FOLDER = "driver"


class RunLock:
    """Held from entry to exit. Raises RunFailed naming the process that holds it."""

    def __init__(self, folder: Path, run: str) -> None:
        self._path = folder / _FILE
        self._run = run
        self._file: IO[str] | None = None

    def __enter__(self) -> "RunLock":
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = self._path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            holder = file.read()
            file.close()
            raise _driven(self._run, holder) from None
        file.truncate(0)
        file.write(json.dumps(_me()))
        file.flush()
        self._file = file
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class RunClaim:
    """Held from entry to exit, for roots that are not on a local disk. Raises RunFailed naming the driver that holds
    it, or that was faster."""

    def __init__(self, root_url: str, run: str, clock: Clock = time.time, term_s: float = CLAIM_TERM_S) -> None:
        self._fs, root = open_url(root_url)
        self._folder = f"{root}/{_FOLDER}"
        self._run, self._clock, self._term_s = run, clock, term_s
        self._path = ""
        self._ended = threading.Event()
        self._renewing: threading.Thread | None = None

    def __enter__(self) -> "RunClaim":
        newest = self._newest()
        if newest >= 0:
            holder = self._read(newest)
            silent_s = self._clock() - float(holder.get("renewed_s", 0.0))
            if silent_s < self._term_s and not holder.get("released") and not _is_gone(holder):
                raise _driven(self._run, json.dumps(holder), f", last heard of {max(silent_s, 0.0):.0f} s ago")
        self._path = self._file(newest + 1)
        try:
            self._fs.pipe_file(self._path, self._claim(), mode="create")
        except FileExistsError:
            raise _driven(self._run, json.dumps(self._read(newest + 1))) from None
        self._renewing = threading.Thread(target=self._renew, name="claim", daemon=True)
        self._renewing.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._renewing is not None:
            self._ended.set()
            self._renewing.join()
            self._renewing = None
            self._write(self._claim(released=True))

    def _renew(self) -> None:
        while not self._ended.wait(self._term_s / 6):
            self._write(self._claim())

    def _write(self, data: bytes) -> None:
        try:
            self._fs.pipe_file(self._path, data)
        except Exception:  # a store that is away for a moment: the next renewal may come through
            return

    def _claim(self, released: bool = False) -> bytes:
        return json.dumps({**_me(), "renewed_s": self._clock(), "released": released}).encode()

    def _newest(self) -> int:
        self._fs.invalidate_cache()
        names = [path.rsplit("/", 1)[-1] for path in self._fs.glob(f"{self._folder}/*.json")]
        return max((int(name.removesuffix(".json")) for name in names), default=-1)

    def _read(self, number: int) -> dict[str, Any]:
        try:
            return dict(json.loads(self._fs.cat_file(self._file(number))))
        except (FileNotFoundError, ValueError):
            return {}

    def _file(self, number: int) -> str:
        return f"{self._folder}/{number:06d}.json"


def _me() -> dict[str, Any]:
    return {"pid": os.getpid(), "host": socket.gethostname()}


def _is_gone(holder: dict[str, Any]) -> bool:
    """Whether a holder of this host is known to be dead."""
    return holder.get("host") == socket.gethostname() and not psutil.pid_exists(int(holder.get("pid", 0)))


def _driven(run: str, holder: str, heard: str = "") -> RunFailed:
    try:
        found = json.loads(holder)
        who = f"process {found['pid']} on {found['host']}"
    except (ValueError, KeyError, TypeError):
        who = "another process"
    return RunFailed(f"the run {run} is being driven by {who}{heard}; wait for it, or stop it first")
