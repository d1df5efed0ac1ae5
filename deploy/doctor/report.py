"""What a probe finds out, in a form for people and for scripts."""

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """How a check came out. Only FAIL keeps `headrace train lookup` from running."""

    OK = "ok"
    MISSING = "missing"
    """Optional, and not there."""
    WARN = "warn"
    """There, but not as it should be, or not to be found out."""
    FAIL = "fail"
    """Needed, and not there or not usable."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One statement about this machine. `fix` is the command or step that mends it; empty when nothing is to do."""

    group: str
    name: str
    status: Status
    detail: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """All checks, in a fixed order."""

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether everything that `headrace train lookup` needs is there."""
        return all(check.status is not Status.FAIL for check in self.checks)

    def data(self) -> dict[str, Any]:
        """As plain data: `ok` and `checks`."""
        return {"ok": self.ok, "checks": [asdict(check) for check in self.checks]}
