"""The red team as the command line runs it: which attacks, and what came of them as facts."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from headrace.actors.gateway.redteam import catalogue
from headrace.actors.gateway.redteam.attack import Attack, AttackClass
from headrace.actors.gateway.redteam.suite import Report, Result, play_all
from headrace.actors.gateway.redteam.ways_out import keep_on_loopback
from headrace.platform.errors import ConfigError


def attacks_of(kinds: Sequence[str]) -> tuple[Attack, ...]:
    """The attacks of some classes, of all where none is named. Raises ConfigError for a class that there is not."""
    known = [str(kind) for kind in AttackClass]
    for kind in kinds:
        if kind not in known:
            raise ConfigError(f"there is no class {kind!r} of attacks; there are {', '.join(known)}")
    return tuple(attack for attack in catalogue.ATTACKS if not kinds or attack.kind in kinds)


def play(attacks: Sequence[Attack], played: Callable[[Result], None]) -> Report:
    """Play them, in a process that connects to nothing but loopback from now on."""
    tried: list[str] = []
    keep_on_loopback(tried.append)
    report = asyncio.run(play_all(attacks, played))
    return msgspec.structs.replace(report, tried=(*report.tried, *tried))


def report_facts(report: Report) -> dict[str, Any]:
    """A report as JSON-safe values. `dialled` are the addresses that attacks would have reached, controls aside."""
    return {
        "holds": report.holds,
        "attacks": len(report.results),
        "classes": [{**msgspec.to_builtins(each), "holds": each.holds} for each in report.classes],
        "results": msgspec.to_builtins(report.results),
        "dialled": sorted({address for each in report.results for address in each.dialled}),
        "tried": list(report.tried),
    }
