"""What every benchmark shares: CPU clocks, repetitions, and the JSON object that ends its output."""

import json
import resource
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field


def cpu_s() -> float:
    """CPU seconds of this process so far, user and system, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


@dataclass(kw_only=True, slots=True)
class Row:
    """One line of the result: the median of a system's repetitions, and their smallest and largest."""

    system: str
    version: str
    figure: float | None
    unit: str
    spread: tuple[float, float] | None
    extra: dict[str, object] = field(default_factory=dict)

    def flat(self) -> dict[str, object]:
        """The row as it stands in the JSON object."""
        row = asdict(self)
        extra = row.pop("extra")
        return {**row, **extra}


def row_of(system: str, version: str, unit: str, samples: Sequence[float], **extra: object) -> Row:
    """A row from the repetitions of one system."""
    return Row(
        system=system,
        version=version,
        figure=round(statistics.median(samples), 3),
        unit=unit,
        spread=(round(min(samples), 3), round(max(samples), 3)),
        extra=extra,
    )


def absent(system: str, unit: str, **extra: object) -> Row:
    """A row for a peer that is not installed here: named, never guessed."""
    return Row(system=system, version="absent", figure=None, unit=unit, spread=None, extra=extra)


def table(rows: Sequence[Row]) -> str:
    """The rows for people to read."""
    lines = []
    for row in rows:
        notes = " ".join(f"{key}={value}" for key, value in row.extra.items())
        if row.figure is None or row.spread is None:
            lines.append(f"{row.system:<34} {'absent':>10}  {notes}")
        else:
            low, high = row.spread
            lines.append(f"{row.system:<34} {row.figure:>10.2f} {row.unit} [{low:.2f}, {high:.2f}]  {notes}")
    return "\n".join(lines)


def result(name: str, ratio: float, target: float, holds: bool, rows: Sequence[Row], **extra: object) -> str:
    """The JSON object, on one line, that ends a benchmark's output."""
    body: Mapping[str, object] = {
        "name": name,
        "ratio": round(ratio, 3),
        "target": target,
        "holds": holds,
        **extra,
        "rows": [row.flat() for row in rows],
    }
    return json.dumps(body)
