"""The metrics file of a run: one JSON object a line, added as things happen; on an object store it is kept in segments
(`platform/store/lines.py`).

It fails open: metrics that cannot be written are counted, never raised, so that a full disk does not end a run here.
"""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from headrace.platform.contracts import Clock
from headrace.platform.observability.names import Metric
from headrace.platform.store.files import open_url
from headrace.platform.store.lines import LineWriter, line_files, read_files

Value: TypeAlias = float | int | str | Mapping[Any, float]

_NAMES = frozenset(metric.value for metric in Metric)


class MetricsFile:
    """Appends records to a `metrics.jsonl`.

    Args:
        url: the file.
        clock: seconds since the epoch, for `time_s`.
        strict: raise ValueError for a name that is not in the table, instead of counting it; on in tests.
    """

    def __init__(self, url: str, clock: Clock, strict: bool = False) -> None:
        self._writer = LineWriter(*open_url(url))
        self._clock = clock
        self._strict = strict
        self.write_errors = 0
        self.unknown_names = 0

    def append(self, values: Mapping[Metric, Value]) -> None:
        """Add one record. A number that is not finite is written as null: JSON has no word for it."""
        record: dict[str, Any] = {Metric.TIME_S.value: self._clock()}
        for name, value in values.items():
            if name in _NAMES:
                record[str(name)] = _plain(value)
            elif self._strict:
                raise ValueError(f"{name!r} is not a metric; add it to the table in observability/names.py")
            else:
                self.unknown_names += 1
        try:
            self._writer.append(json.dumps(record, allow_nan=False).encode() + b"\n")
        except Exception:  # whatever a file system raises: metrics fail open
            self.write_errors += 1


def read_metrics(url: str) -> Iterator[dict[str, Any]]:
    """The records of a metrics file in order. A line that a crash tore is left out.

    Raises:
        FileNotFoundError: there is none.
    """
    fs, path = open_url(url)
    files = line_files(fs, path)
    if not files:
        raise FileNotFoundError(f"there are no metrics at {url}")
    for _, data in read_files(fs, files):
        for line in data.split(b"\n"):
            try:
                record = json.loads(line)
            except ValueError:
                continue
            yield record


def _plain(value: Value) -> Any:
    if isinstance(value, Mapping):
        return {str(label): count for label, count in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
