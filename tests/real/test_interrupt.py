"""Ctrl-C in the middle of a run through the real command line: exit code 130, a summary, and no process left."""

import json
import os
import signal
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from command_line import environment, start

pytestmark = pytest.mark.timeout(240)
MARK = "HEADRACE_TEST_MARK"
WAIT_S, CLEAN_S = 90.0, 60.0


@pytest.fixture
def ray_folder():
    """A short folder of its own for Ray's sockets; its path marks every process of that Ray."""
    with tempfile.TemporaryDirectory(prefix="hr-", dir="/tmp") as folder:
        yield folder


def marked(mark: str) -> dict[int, str]:
    """Every living process of this machine that was started with the mark in its environment."""
    found = {}
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = " ".join(process.cmdline())[:120]
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def wait_for(what, seconds: float, process=None):
    """Poll until `what()` says something; fail when the time is over or the process ended. Its group ends then, too."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := what():
            return found
        if process is not None and process.poll() is not None:
            pytest.fail(f"it ended with {process.returncode}:\n{process.communicate()[1][-3000:]}")
        time.sleep(0.1)
    if process is not None:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    return pytest.fail(f"waited {seconds:g} s in vain")


def steps_done(runs: Path) -> int:
    return sum(file.read_text().count('"loss"') for file in runs.glob("*/metrics.jsonl"))


def begin(tmp_path: Path, ray_folder: str, mark: str, *changes: str):
    env = environment(**{MARK: mark, "RAY_TMPDIR": ray_folder})
    return start(tmp_path, "train", "lookup-slow", f"runs_dir={tmp_path / 'runs'}", "--json", *changes, env=env)


def given(model: Path) -> tuple[str, ...]:
    return (f"model.path={model}", "model.tiny_llama=null", "sft=null", "eval.tasks=16")


def ended(process, mark: str) -> tuple[int, str, dict]:
    """Exit code, standard error and what was still alive when it was over."""
    try:
        _, err = process.communicate(timeout=CLEAN_S)
    finally:
        left = marked(mark)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    return process.returncode, err, left


def only_summary(runs: Path) -> dict:
    (file,) = runs.glob("*/summary.json")
    return json.loads(file.read_text())


def test_in_the_middle_of_reinforcement_learning(lookup_model, tmp_path, ray_folder):
    mark, runs = f"{os.getpid()}-rl", tmp_path / "runs"
    process = begin(tmp_path, ray_folder, mark, *given(lookup_model))
    wait_for(lambda: steps_done(runs) >= 2, WAIT_S, process)
    assert len(marked(mark)) > 5, "Ray, its workers and the server bear the mark"
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group
    code, err, left = ended(process, mark)
    assert code == 130, err[-3000:]
    assert not left
    assert "Traceback" not in err, err[-3000:]
    assert err.rstrip().endswith("interrupted")
    summary = only_summary(runs)
    assert summary["failed"] == "interrupted"
    assert summary["learner_steps"] >= 2
    assert summary["equation_holds"] and summary["fates"]["in_flight"] == 0


def test_during_the_supervised_stages(tmp_path, ray_folder):
    mark, runs = f"{os.getpid()}-sft", tmp_path / "runs"
    cache = tmp_path / "cache"
    process = begin(tmp_path, ray_folder, mark, f"sft.cache_dir={cache}", "seed=99")
    wait_for(lambda: any('"sft_step"' in file.read_text() for file in runs.glob("*/metrics.jsonl")), WAIT_S, process)
    process.send_signal(signal.SIGINT)
    code, err, left = ended(process, mark)
    assert code == 130, err[-3000:]
    assert not left
    assert only_summary(runs)["failed"] == "interrupted"
    assert not list((cache / "sft").iterdir()), "half a base model is no base model"


def test_a_killed_driver_takes_its_processes_along(lookup_model, tmp_path, ray_folder):
    mark, runs = f"{os.getpid()}-kill", tmp_path / "runs"
    process = begin(tmp_path, ray_folder, mark, *given(lookup_model))
    wait_for(lambda: steps_done(runs) >= 1, WAIT_S, process)
    process.kill()
    process.communicate()
    try:
        wait_for(lambda: not marked(mark), CLEAN_S)
    finally:
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)
