"""What a logger is, and what it is given."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.platform.observability.names import Metric


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """The numbers of one metrics record.

    `values` holds finite numbers by name, as in `metrics.jsonl`; an entry of a histogram or a labelled counter is
    `lag/0`. `step` counts along `axis`: supervised stages have steps of their own.
    """

    values: Mapping[str, float]
    axis: Metric
    step: int
    time_s: float
    """When the record was written, seconds since the epoch."""


class RunLogger(Protocol):
    """Sends the metrics of one run somewhere.

    `start`, then `log` any number of times, then `finish`, all from one thread of the logger's own, which may block.
    Whatever is raised is counted and goes no further: metrics fail open. After a failed `start` nothing else is called.
    """

    def start(self, run: str, config: Mapping[str, Any], root: str) -> None:
        """Open the run.

        Args:
            run: its id, the name under which it appears.
            config: the recipe as plain data; secrets in it are references and stay so.
            root: a local folder, below which the logger writes its files into `logs/`: the run root, or what stands for
                it on this node where the run root is remote.
        """

    def log(self, point: Point) -> None:
        """Send one record."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Send the run's summary, flush, and leave no thread and no process behind.

        A summary with the key `failed` is that of a run that failed; an empty one means that the run broke off.
        """
