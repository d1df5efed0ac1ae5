"""A run of the real command line whose processes are killed while it goes on.

Owns one process group at a time: the driver, and what it starts. Kills by pid, and only descendants of the driver. A
run has *got going* when it has done a learner step since it was last killed; the seconds until then are its recovery.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil

from headrace.platform.errors import DeadlineExceeded, RunFailed
from headrace.platform.observability.metrics import read_metrics
from headrace.platform.observability.names import Metric
from headrace.platform.observability.parts import read_parts
from headrace.platform.testing.failpoints import FAILPOINTS, FOLDER_VARIABLE, arm
from headrace.platform.testing.kills.audit import Audit, audit
from headrace.platform.testing.kills.plan import GROUP, Kill

T = TypeVar("T")
_POLL_S = 0.05
_SERVER_NAMES = ("valkey-server", "redis-server")


class Killed(msgspec.Struct, frozen=True, kw_only=True):
    """A kill that happened, and the seconds until the next learner step."""

    kind: str
    recovery_s: float


class SoakRun:
    """One run in `folder`.

    Args:
        folder: an empty folder for the run root, the logs and the failpoints.
        command: how to call `headrace`.
        recipe: the recipe and its overrides.
        deadline_s: how long anything may take: a start, a recovery, the end.
        env: more environment variables.
    """

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        recipe: Sequence[str],
        *,
        deadline_s: float = 180.0,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = folder
        self._command = list(command)
        self._recipe = list(recipe)
        self._deadline_s = deadline_s
        self._failpoints = folder / "failpoints"
        self._env = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {}), FOLDER_VARIABLE: str(self._failpoints)}
        self._process: subprocess.Popen[Any] | None = None
        self._started = 0

    def start(self) -> None:
        """Start the run, or go on with it after a kill of the whole group."""
        self._failpoints.mkdir(parents=True, exist_ok=True)
        runs = f"--runs-dir={self._folder / 'runs'}"
        resumed = self._started > 0
        arguments = ["train", self.root.name, "--resume", runs] if resumed else ["train", *self._recipe, runs]
        self._started += 1
        with self._log("out").open("wb") as out, self._log("err").open("wb") as err:
            self._process = subprocess.Popen(
                [*self._command, *arguments, "--json"],
                cwd=self._folder,
                env=self._env,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def watch(self, process: subprocess.Popen[Any]) -> None:
        """Go on with a driver that somebody else has started, with its run root in this folder."""
        self._process = process

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}-{self._started}.txt"

    @property
    def root(self) -> Path:
        """The run root. Raises FileNotFoundError before there is one."""
        for config in (self._folder / "runs").glob("*/config.yaml"):
            return config.parent
        raise FileNotFoundError(f"no run root in {self._folder / 'runs'}")

    def steps(self) -> list[int]:
        """The learner steps written down so far, in order; after a resume some are done again."""
        try:
            records = list(read_metrics(str(self.root / "metrics.jsonl")))
        except FileNotFoundError:
            return []
        return [record[Metric.LEARNER_STEP] for record in records if Metric.LOSS in record]

    def wait_step(self, after: int) -> None:
        """Wait for another learner step than the first `after`. Raises RunFailed when the run ends instead."""
        self._wait(f"learner step {after + 1}", lambda: len(self.steps()) > after)

    def kill(self, kill: Kill) -> Killed:
        """Kill as planned, and wait until the run has got going again."""
        time.sleep(kill.delay_s)
        if kill.kind in FAILPOINTS:
            arm(self._failpoints, kill.kind)
            self._wait(f"somebody at {kill.kind}", lambda: not (self._failpoints / kill.kind).exists())
        elif kill.kind == GROUP:
            os.killpg(self._alive().pid, signal.SIGKILL)
            self._alive().wait()
            self.start()
        else:
            os.kill(self._wait(f"a process of {kill.kind}", lambda: self._pid(kill.kind)), signal.SIGKILL)
        began, done = time.monotonic(), len(self.steps())
        self.wait_step(done)
        return Killed(kind=kill.kind, recovery_s=round(time.monotonic() - began, 2))

    def finish(self) -> dict[str, Any]:
        """Wait for the end of the run; its summary."""
        process = self._alive()
        process.wait(self._deadline_s * 2)
        if process.returncode != 0:
            raise RunFailed(f"the run ended with {process.returncode}:\n{self._errors()}")
        return dict(json.loads((self.root / "summary.json").read_text("utf-8")))

    def close(self) -> None:
        """End what is left of it."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _alive(self) -> subprocess.Popen[Any]:
        if self._process is None:
            raise RunFailed("the run was not started")
        return self._process

    def _pid(self, part: str) -> int:
        """The present process of a part, 0 while it has none."""
        try:
            family = {child.pid: child for child in psutil.Process(self._alive().pid).children(recursive=True)}
            if part == "server":
                return next((pid for pid, child in family.items() if child.name() in _SERVER_NAMES), 0)
        except psutil.NoSuchProcess:
            return 0
        return next((each.pid for each in read_parts(str(self.root)) if each.part == part and each.pid in family), 0)

    def _wait(self, what: str, look: Callable[[], T]) -> T:
        end_s = time.monotonic() + self._deadline_s
        while not (found := look()):
            if self._alive().poll() is not None:
                raise RunFailed(f"the run ended while it was waited for {what}:\n{self._errors()}")
            if time.monotonic() > end_s:
                raise DeadlineExceeded(f"waited {self._deadline_s:g} s for {what}")
            time.sleep(_POLL_S)
        return found

    def _errors(self) -> str:
        if not self._log("err").exists():
            return "(its output goes elsewhere)"
        return self._log("err").read_text("utf-8", errors="replace")[-3000:]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one run: who was killed, its summary, and what its root says."""

    killed: tuple[Killed, ...]
    summary: dict[str, Any]
    audit: Audit

    @property
    def holds(self) -> bool:
        """The equation (P3), and never twice."""
        return bool(self.summary["equation_holds"]) and self.audit.holds


def soak(run: SoakRun, kills: Sequence[Kill], until_step: int) -> Outcome:
    """Carry `run` through and kill as planned, one after the other, while its last learner step is below `until_step`.

    Raises:
        RunFailed: it ended in any other way than with success.
        DeadlineExceeded: it stands still.
    """
    killed: list[Killed] = []
    try:
        run.start()
        run.wait_step(0)
        for kill in kills:
            if run.steps()[-1] >= until_step:
                break
            killed.append(run.kill(kill))
        summary = run.finish()
    finally:
        run.close()
    return Outcome(killed=tuple(killed), summary=summary, audit=audit(str(run.root), summary))
