"""Runs the parts, each in a process group of its own, and writes what they found.

Knows of a part its name and its deadline, and reads its reports; what it imports is in its own process.
"""

import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from .report import heard

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
TOTAL_S = 465.0
"""For everything: eight minutes, less what starting, ending and writing take."""
DEADLINES_S = {"generation": 180.0, "transfer": 110.0, "attention": 90.0, "zero": 80.0, "learner": 90.0}
"""Of each part, in the order in which they run, and never more than is left of the whole. vLLM compiles and captures
graphs in the first; the last three compile attention."""
_REHEARSAL_PATIENCE = 4.0
"""So many times longer: CPUs are slow, and shared."""


def say(line: str) -> None:
    """To whoever has called."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def no_gpu() -> str:
    """Why nothing can be checked here, in one sentence; empty where it can."""
    needs = "gpu-check needs an NVIDIA GPU with 24 GB or more and torch built for CUDA (docs/gpu.md)"
    try:
        import torch
    except ImportError:
        return f"{needs}; {sys.executable} has no torch."
    return "" if torch.cuda.is_available() else f"{needs}; torch {torch.__version__} finds no GPU here."


def conduct(parts: Sequence[str], machine: Mapping[str, Any], *, rehearse: bool, out: Path | None) -> int:
    """Run `parts`, say a line for each, write the file.

    Args:
        parts: names from `DEADLINES_S`.
        machine: goes into the file.
        rehearse: on the CPU; nothing is written unless `out` says where.
        out: instead of benchmarks/results/gpu-DATE.json.

    Returns:
        The exit status.
    """
    began, patience = time.monotonic(), _REHEARSAL_PATIENCE if rehearse else 1.0
    results: dict[str, dict[str, Any]] = {}
    for part in parts:
        left = patience * TOTAL_S - (time.monotonic() - began)
        results[part] = run(command(part, rehearse=rehearse), min(patience * DEADLINES_S[part], left))
        say(line(part, results[part]))
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    path = out or (None if rehearse else RESULTS / f"gpu-{today}.json")
    if path is not None:
        seconds = round(time.monotonic() - began, 1)
        content = {"date": today, "rehearsal": rehearse, "seconds": seconds, "machine": machine, "parts": results}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        say(f"wrote {path}")
    return int(any(result["status"] == "failed" for result in results.values()))


def run(command: Sequence[str], deadline_s: float) -> dict[str, Any]:
    """What one part found: status (`ok`, `failed` or `nothing`), why, seconds and figures.

    Args:
        command: the part, whose output has reports.
        deadline_s: after so long it is killed, with all that it started.
    """
    began = time.monotonic()
    if deadline_s <= 0:
        return {"status": "failed", "why": "no time was left for it", "seconds": 0.0, "figures": {}}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        child = subprocess.Popen(command, cwd=ROOT, stdout=output, start_new_session=True)
        try:
            status = child.wait(deadline_s)
            ended = f"it ended with {status}" if status else ""
        except subprocess.TimeoutExpired:
            ended = f"it took over {deadline_s:.0f} s"
        finally:
            with suppress(ProcessLookupError):  # vLLM's processes are of the same group
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        output.seek(0)
        report = heard(output.read())
    faults = [*report["faults"], *filter(None, [ended])]
    if not faults and not report["figures"] and not report["absent"]:
        faults = ["it said nothing"]
    return {
        "status": "failed" if faults else "nothing" if report["absent"] else "ok",
        "why": "; ".join(faults) or report["absent"],
        "seconds": round(time.monotonic() - began, 1),
        "figures": report["figures"],
    }


def line(part: str, result: Mapping[str, Any]) -> str:
    """A part's result for people."""
    figures = " ".join(f"{name}={value}" for name, value in result["figures"].items())
    words = {"ok": "ok", "failed": "FAILED", "nothing": "nothing to check"}[result["status"]]
    return "  ".join(filter(None, [f"{part:<11}{words} in {result['seconds']} s", result["why"], figures]))


def command(part: str, *, rehearse: bool) -> list[str]:
    """Runs a part from the project's folder."""
    return [sys.executable, "-m", __package__, "--inside", part, *(["--rehearse"] if rehearse else [])]
