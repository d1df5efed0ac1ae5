"""Runs the lint and the test tiers one after another and says how long each took; stops at the first that fails.

`python tests/runner.py [lint] [fast] [real] [heavy]`; without arguments all four, in this order. Each tier is a pytest
run of its own, so that servers and engines of one do not live on into the next. A tier without tests fails.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TIERS = ("lint", "fast", "real", "heavy")
PYTEST = [sys.executable, "-m", "pytest"]
BIN = Path(sys.executable).parent
LINT = [
    [str(BIN / "ruff"), "format", "--check", "."],
    [str(BIN / "ruff"), "check", "."],
    [str(BIN / "mypy")],
]


def commands(tier: str) -> list[list[str]]:
    """What a tier runs. The architecture test belongs to the fast tier."""
    if tier == "lint":
        return LINT
    also = ["tests/test_architecture.py"] if tier == "fast" else []
    return [[*PYTEST, f"tests/{tier}", *also, "--durations=20"]]


def has_tests(tier: str) -> bool:
    """Whether a tier's folder holds test files."""
    return any((ROOT / "tests" / tier).rglob("test_*.py"))


def execute(command: Sequence[str]) -> int:
    """Run a command from the project's folder; its exit status."""
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def run(tiers: Sequence[str], execute: Callable[[list[str]], int], has_tests: Callable[[str], bool] = has_tests) -> int:
    """Run tiers in order. Returns 0, or 1 after the first that failed."""
    report: list[str] = []
    status = 0
    for tier in tiers:
        say(f"== {tier}")
        start = time.perf_counter()
        if tier != "lint" and not has_tests(tier):
            say(f"tests/{tier} holds no test")
            status = 1
        elif any(execute(command) != 0 for command in commands(tier)):
            status = 1
        report.append(f"tier {tier} {'failed' if status else 'passed'} after {time.perf_counter() - start:.0f} s")
        if status:
            break
    say("\n".join(report))
    return status


def say(text: str) -> None:
    """Print in step with the output of the commands."""
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
