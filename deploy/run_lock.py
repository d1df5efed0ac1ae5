"""One driver at a time: a lock on a run root that the kernel lets go of when its holder dies.

It guards roots on a local disk. Drivers of a root on an object store meet in the ledger, which keeps a run for a
learner that was heard of lately (`Ledger.acquire_learner`).
"""

import fcntl
import json
import os
import socket
from pathlib import Path
from types import TracebackType
from typing import IO

from headrace.platform.errors import RunFailed

_FILE = "driver.lock"


class RunLock:
    """Held from entry to exit. Raises RunFailed naming the process that holds it."""

    def __init__(self, folder: Path, run: str) -> None:
        self._path = folder / _FILE
        self._run = run
        self._file: IO[str] | None = None

    def __enter__(self) -> "RunLock":
        file = self._path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            holder = file.read()
            file.close()
            raise RunFailed(
                f"the run {self._run} is being driven by {_shown(holder)}; wait for it, or stop it first"
            ) from None
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        file.flush()
        self._file = file
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _shown(holder: str) -> str:
    try:
        found = json.loads(holder)
        return f"process {found['pid']} on {found['host']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
