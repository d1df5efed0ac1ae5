"""What happened to a run, for people and for status: started, resumed, a part restarted, an environment changed.

One JSON object a line in `events.jsonl` (see `lines.py` for object stores), written by the driver. Events are few;
each is durable on return.
"""

import json
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

from headrace.platform.contracts import Clock
from headrace.platform.store.files import open_url
from headrace.platform.store.lines import LineWriter, line_files, read_files

FILE = "events.jsonl"


class RunEvent(StrEnum):
    """The kinds of events."""

    STARTED = "started"
    RESUMED = "resumed"
    PART_DIED = "part_died"
    PART_RESTARTED = "part_restarted"
    RECONCILED = "reconciled"
    POOL_SCALED = "pool_scaled"
    ENVIRONMENTS_ALLOWED = "environments_allowed"
    ENDED = "ended"


class Events:
    """The events of a run root."""

    def __init__(self, root_url: str, clock: Clock) -> None:
        self._fs, root = open_url(root_url)
        self._path = f"{root}/{FILE}"
        self._writer = LineWriter(self._fs, self._path)
        self._clock = clock

    def add(self, kind: RunEvent, **detail: Any) -> None:
        """Write one down."""
        line = json.dumps({"time_s": self._clock(), "event": kind.value, **detail})
        self._writer.append(line.encode() + b"\n", durable=True)

    def read(self) -> Iterator[dict[str, Any]]:
        """All of them, in order. A line that a crash tore is left out."""
        for _, data in read_files(self._fs, line_files(self._fs, self._path)):
            for line in data.split(b"\n"):
                try:
                    yield json.loads(line)
                except ValueError:
                    continue
