"""One logger in a thread of its own, behind a bounded queue.

The run never waits for it: a full queue drops the newest record and counts it, an exception is counted and logged once.
The thread is a daemon, so that a logger that never returns cannot keep the process alive.
"""

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.platform.config.secret_references import SecretValues
from headrace.platform.observability.loggers.contract import Point, RunLogger

_log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class LoggerReport:
    """What became of the records that one logger was given. `cause` is the first thing that went wrong."""

    written: int = 0
    dropped: int = 0
    failed: int = 0
    cause: str = ""


@dataclass(frozen=True, slots=True)
class _End:
    summary: Mapping[str, Any]


class BackgroundLogger:
    """Feeds one `RunLogger`.

    Args:
        name: the logger's kind, for messages.
        logger: what does the work.
        capacity: records that may wait.
        secrets: taken out of causes.
    """

    def __init__(self, name: str, logger: RunLogger, capacity: int, secrets: SecretValues) -> None:
        self.name = name
        self.report = LoggerReport()
        self._logger = logger
        self._capacity = capacity
        self._secrets = secrets
        self._queue: queue.SimpleQueue[Point | _End] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._doing = "start"

    def start(self, run: str, config: Mapping[str, Any], root: str) -> None:
        """Begin, in the thread; returns at once."""
        self._thread = threading.Thread(
            target=self._work, args=(run, config, root), name=f"headrace-logger-{self.name}", daemon=True
        )
        self._thread.start()

    def offer(self, point: Point) -> None:
        """Take a record, or drop it when too many wait."""
        if self._queue.qsize() >= self._capacity:
            self.report.dropped += 1
            self._note(f"its queue of {self._capacity} records is full, so newer ones are dropped")
        else:
            self._queue.put(point)

    def end(self, summary: Mapping[str, Any]) -> None:
        """Let it finish with what waits, and then end."""
        self._queue.put(_End(summary))

    def join(self, deadline_s: float) -> bool:
        """Wait for the end. False means that it is still busy; it is left behind."""
        if self._thread is None:
            return True
        self._thread.join(max(deadline_s, 0.0))
        if self._thread.is_alive():
            self._note(f"it was busy with {self._doing} when time was up, so it was left behind; what waited is lost")
            return False
        return True

    def _work(self, run: str, config: Mapping[str, Any], root: str) -> None:
        started = self._attempt("start", self._logger.start, run, config, root)
        while True:
            item = self._queue.get()
            if isinstance(item, _End):
                summary = item.summary
                break
            if started and self._attempt("log", self._logger.log, item):
                self.report.written += 1
            else:
                self.report.failed += 1
        if started:
            self._attempt("finish", self._logger.finish, summary)

    def _attempt(self, what: str, call: Callable[..., None], *args: Any) -> bool:
        self._doing = what
        try:
            call(*args)
        except Exception as error:  # whatever a service or its library raises: metrics fail open
            self._note(f"{what} failed: {type(error).__name__}: {error}")
            return False
        return True

    def _note(self, cause: str) -> None:
        """Remember and log the first cause only; the rest is counted."""
        if not self.report.cause:
            self.report.cause = self._secrets.redact(cause)
            _log.warning("the logger %s: %s", self.name, self.report.cause)
