"""Runs probes side by side, each with a deadline and none with a traceback.

A probe that raises or does not answer becomes a statement too. Its thread is a daemon, so that it cannot hold the
process; what a probe starts, it ends itself (`Host.run` kills, the embedded server dies with its thread).
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.deploy.doctor.report import Check, Status

DEADLINE_S = 8.0
"""How long all probes together may take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """One question to the machine. `needed`: `headrace train lookup` does not run without a good answer."""

    group: str
    name: str
    ask: Callable[[], Sequence[Check]]
    needed: bool = False

    def unanswered(self, detail: str, fix: str = "") -> Check:
        """The statement that there is no answer."""
        status = Status.FAIL if self.needed else Status.WARN
        return Check(group=self.group, name=self.name, status=status, detail=detail, fix=fix)


def ask_all(probes: Sequence[Probe], deadline_s: float = DEADLINE_S) -> tuple[Check, ...]:
    """The checks of all probes, in their order, after at most `deadline_s`."""
    answers: queue.SimpleQueue[tuple[int, Sequence[Check]]] = queue.SimpleQueue()
    for index, probe in enumerate(probes):
        threading.Thread(
            target=lambda index=index, probe=probe: answers.put((index, _ask(probe))),
            name=f"headrace-probe-{probe.name}",
            daemon=True,
        ).start()
    found: dict[int, Sequence[Check]] = {}
    end_s = time.monotonic() + deadline_s
    while len(found) < len(probes):
        try:
            index, checks = answers.get(timeout=max(end_s - time.monotonic(), 0.0))
        except queue.Empty:
            break
        found[index] = checks
    late = f"no answer within {deadline_s:g} s"
    return tuple(
        check
        for index, probe in enumerate(probes)
        for check in found.get(index)
        or [probe.unanswered(late, "run `headrace doctor` again when the machine is idle")]
    )


def _ask(probe: Probe) -> Sequence[Check]:
    try:
        return probe.ask()
    except Exception as error:  # a doctor describes what is broken, whatever it is
        return [probe.unanswered(f"{type(error).__name__}: {error}")]
