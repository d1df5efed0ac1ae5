"""Runs the lint and the test tiers one after another and says how long each took; stops at the first that fails.

`python tests/runner.py [lint] [fast] [real] [heavy]`; without arguments all four, in this order. Each tier is a run of
pytest of its own, so that servers and engines of one do not live on into the next. The fast and the heavy one are two
processes each, the *lanes*, which share its files (plugins/lanes.py); the real one has limits of time that a busy
machine would miss. A tier without tests fails.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
TIERS = ("lint", "fast", "real", "heavy")
LANES = min(2, os.cpu_count() or 1)
IN_LANES = ("fast", "heavy")
BIN = Path(sys.executable).parent
LINT = [
    [str(BIN / "ruff"), "format", "--check", "."],
    [str(BIN / "ruff"), "check", "."],
    [str(BIN / "mypy")],
]


def commands(tier: str, claims: str) -> list[list[str]]:
    """What a tier runs at the same time. The architecture test belongs to the fast tier."""
    if tier == "lint":
        return LINT
    also = ["tests/test_architecture.py"] if tier == "fast" else []
    lane = [sys.executable, "-m", "pytest", f"tests/{tier}", *also, f"--lanes={claims}", "--durations=20"]
    return [lane] * (LANES if tier in IN_LANES else 1)


def has_tests(tier: str) -> bool:
    """Whether a tier's folder holds test files."""
    return any((ROOT / "tests" / tier).rglob("test_*.py"))


def execute(commands: Sequence[Sequence[str]]) -> bool:
    """Run commands at the same time from the project's folder; whether all succeed."""
    marks = [f"{n}| " if len(commands) > 1 else "" for n in range(1, len(commands) + 1)]
    with ThreadPoolExecutor(len(commands)) as pool:
        return all(list(pool.map(succeeds, commands, marks)))


def succeeds(command: Sequence[str], mark: str) -> bool:
    """Run one command and pass on what it says line by line, each with a mark; whether it succeeds."""
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        output: IO[str] | None = process.stdout
        for line in output or ():
            say(f"{mark}{line.rstrip()}")
    return process.returncode == 0


def run(
    tiers: Sequence[str],
    execute: Callable[[Sequence[Sequence[str]]], bool],
    has_tests: Callable[[str], bool] = has_tests,
) -> int:
    """Run tiers in order. Returns 0, or 1 after the first that failed."""
    report: list[str] = []
    status = 0
    for tier in tiers:
        say(f"== {tier}")
        start = time.perf_counter()
        if tier != "lint" and not has_tests(tier):
            say(f"tests/{tier} holds no test")
            status = 1
        else:
            with tempfile.TemporaryDirectory(prefix="headrace-lanes-") as claims:
                status = 0 if execute(commands(tier, claims)) else 1
        report.append(f"tier {tier} {'failed' if status else 'passed'} after {time.perf_counter() - start:.0f} s")
        if status:
            break
    say("\n".join(report))
    return status


def say(text: str) -> None:
    """Print a line, whole also beside those of others."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Run lint and test tiers.")
    parser.add_argument("tiers", nargs="*", metavar="tier", help=f"any of {', '.join(TIERS)}; default: all")
    chosen = parser.parse_args(arguments).tiers
    if unknown := set(chosen) - set(TIERS):
        parser.error(f"unknown tier {', '.join(sorted(unknown))}; known: {', '.join(TIERS)}")
    return run([tier for tier in TIERS if not chosen or tier in chosen], execute)


if __name__ == "__main__":
    sys.exit(main())
