"""What a part has found, told line by line, so that the figures before a crash or a deadline are not lost."""

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

_MARK = "gpu-check: "


@dataclass(slots=True)
class Report:
    """Figures by name; `faults` say what does not hold, `absent` why there was nothing to check.

    Every change is written to standard output.
    """

    figures: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    absent: str = ""

    def add(self, **figures: object) -> None:
        """Take in figures; floats are kept to four digits."""
        self.figures |= {name: _rounded(value) for name, value in figures.items()}
        self._tell()

    def limit(self, name: str, value: float, largest: float) -> None:
        """A figure that must not be above `largest`, nor NaN."""
        if not value <= largest:
            self.faults.append(f"{name} is {value:.4g}, above {largest:g}")
        self.add(**{name: value, f"{name}_limit": largest})

    def fail(self, why: str) -> None:
        """Something does not hold."""
        self.faults.append(why)
        self._tell()

    def nothing(self, why: str) -> None:
        """There is nothing to check."""
        self.absent = why
        self._tell()

    def _tell(self) -> None:
        sys.stdout.write(f"{_MARK}{json.dumps(asdict(self))}\n")
        sys.stdout.flush()


def heard(output: str) -> Mapping[str, Any]:
    """The last whole report in what a part wrote; an empty one where there is none."""
    for line in reversed(output.splitlines()):
        if line.startswith(_MARK):
            try:
                return dict(json.loads(line.removeprefix(_MARK)))
            except ValueError:
                continue
    return asdict(Report())


def _rounded(value: object) -> object:
    return float(f"{value:.4g}") if isinstance(value, float) else value
