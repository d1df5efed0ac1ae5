"""The command line as tests use it: in this process, or as a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

SMALL_RUN = ("model.tiny_llama=null", "sft=null", "learner.steps=3", "learner.batch_groups=4", "eval.tasks=16")
"""What makes a run of `lookup` small, beside a given `model.path`."""
HEADRACE = [sys.executable, "-c", "from headrace.deploy.cli import main; main()"]


def call_main(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    """Run `headrace ARGS` in this process; its exit code."""
    from headrace.deploy.cli import main

    monkeypatch.setattr(sys, "argv", ["headrace", *args])
    with pytest.raises(SystemExit) as ending:
        main()
    code = ending.value.code
    return code if isinstance(code, int) else 0


def environment(**changes: str) -> dict[str, str]:
    """What a `headrace` process gets, on top of this one's."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **changes}


def start(folder: Path, *args: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """`headrace ARGS` as a process group of its own, in `folder`."""
    return subprocess.Popen(
        [*HEADRACE, *args],
        cwd=folder,
        env=dict(env or environment()),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def run(folder: Path, *args: str, timeout_s: float, env: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """`headrace ARGS` to its end: exit code, output, and what went to standard error."""
    process = start(folder, *args, env=env)
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    return process.returncode, out, err


def last_json(out: str) -> dict[str, Any]:
    """The JSON object on the last line."""
    return dict(json.loads(out.strip().splitlines()[-1]))
