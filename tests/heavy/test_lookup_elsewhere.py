"""The main job with its world in sandboxes, and on environment hosts; both lose some of it on the way (cases E13, E10),
the gateway too.

Both reach what the plain job reaches: a fault of the world is a new attempt, never a reward.
"""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from command_line import environment, last_json, start
from command_line import run as command

pytestmark = pytest.mark.timeout(900)
MARK = "HEADRACE_TEST_MARK"
RUN_S = 840.0
SOME = 12


def wait_for(what: Callable[[], object], process, seconds: float) -> None:
    """Poll until `what()` is true; fail when the time is over or the process ended."""
    end = time.monotonic() + seconds
    while not what():
        assert process.poll() is None, f"it ended with {process.returncode}:\n{process.communicate()[1][-3000:]}"
        assert time.monotonic() < end, f"waited {seconds:g} s in vain"
        time.sleep(0.1)


def steps_done(runs: Path) -> int:
    return sum(file.read_text().count('"loss"') for file in runs.glob("*/metrics.jsonl"))


def boxes(mark: str) -> list[psutil.Process]:
    """The sandboxes of the run, oldest first: bwrap below a process with the mark in its environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.name() == "bwrap" and any(each.environ().get(MARK) == mark for each in process.parents()):
                found.append((process.create_time(), process))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return [box for _, box in sorted(found, key=lambda pair: pair[0])]


def finished(process) -> dict:
    out, err = process.communicate(timeout=RUN_S)
    assert process.returncode == 0, err[-3000:]
    summary = last_json(out)
    assert summary["success_after"] >= 0.90
    assert summary["equation_holds"] and summary["fates"]["in_flight"] == 0
    return summary


@contextmanager
def ended(process) -> Iterator[None]:
    """Whatever happens, nothing of it stays behind."""
    try:
        yield
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_in_sandboxes_some_of_which_are_killed_twice_on_the_way(tmp_path: Path, lookup_model: Path) -> None:
    runs, mark = tmp_path / "runs", f"boxes-{os.getpid()}"
    changes = ("environment.sandbox=bubblewrap", "learner.steps=16", "eval.tasks=128", f"runs_dir={runs}")
    given = (f"model.path={lookup_model}", "model.tiny_llama=null", "sft=null")
    run = start(tmp_path, "train", "lookup", *changes, *given, "--json", env=environment(**{MARK: mark}))

    def some_killed() -> bool:
        """Kill the newest ones: the oldest have played to their end before the list of them is complete."""
        found = boxes(mark)[-SOME:]
        for box in found:
            with contextlib.suppress(psutil.NoSuchProcess):  # its episode has just ended
                box.kill()
        return bool(found)

    with ended(run):
        for step in (2, 5):
            wait_for(lambda step=step: steps_done(runs) >= step, run, 400)
            wait_for(some_killed, run, 60)
        os.kill(int(next(runs.glob("*/gateway/pid")).read_text()), signal.SIGKILL)
        summary = finished(run)
    assert summary["fates"]["failed"] >= 1, "a killed sandbox fails its attempt"
    assert not boxes(mark), "no sandbox is left behind"
    safety = summary["safety"]
    assert safety["calls"] > 0 and safety["violations"] == 0, "its tools go through the gateway"
    code, out, err = command(tmp_path, "audit", "verify", summary["run"], "--json", timeout_s=120)
    verified = last_json(out)
    assert (code, verified["holds"]) == (0, True), err
    assert len(verified["chains"]) >= 2, "the gateway was killed once, and the next one began a chain"


def test_on_a_pool_that_is_restarted_on_the_way(tmp_path: Path, lookup_model: Path) -> None:
    runs, registry = tmp_path / "runs", tmp_path / "hosts.json"

    def serve():
        host = start(tmp_path, "env", "serve", "lookup", "--registry", str(registry), "--grace", "2")
        wait_for(lambda: registry.exists() and json.loads(registry.read_text()), host, 60)
        return host

    first = serve()
    changes = (f"environment.pool={registry}", "learner.steps=16", "eval.tasks=128", f"runs_dir={runs}")
    given = (f"model.path={lookup_model}", "model.tiny_llama=null", "sft=null")
    with ended(first):
        run = start(tmp_path, "train", "lookup", *changes, *given, "--json")
        with ended(run):
            wait_for(lambda: steps_done(runs) >= 3, run, 400)
            first.terminate()
            first.communicate(timeout=30)
            assert first.returncode == 0, "a host that drains ends in peace"
            assert json.loads(registry.read_text()) == []
            second = serve()
            with ended(second):
                summary = finished(run)
    assert summary["lag_max_trained"] <= 4
