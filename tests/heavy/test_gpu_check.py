"""`make gpu-check` in small on the CPU, each part in its own process. Its two parts with vLLM take minutes to start and
are rehearsed by hand (docs/gpu.md): the same engine and transports have tests of their own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("attention", "zero", "learner")


@pytest.mark.timeout(600)
def test_the_rehearsal_holds(tmp_path: Path) -> None:
    out = tmp_path / "rehearsal.json"
    ended = subprocess.run(
        [sys.executable, "-m", "scripts.gpu_check", *PARTS, "--rehearse", "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    parts = json.loads(out.read_text())["parts"]
    assert {name: part["status"] for name, part in parts.items()} == dict.fromkeys(PARTS, "ok")
