"""The runner of the tiers and the rule that CI skips nothing, each tried on a small tree of its own."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]

SKIPS = """
import pytest
def test_passes(): assert True
def test_skips(): pytest.skip("no server here")
@pytest.mark.skipif(True, reason="no engine here")
def test_marked(): assert True
@pytest.mark.xfail(reason="known", strict=True)
def test_expected(): assert False
"""


@pytest.fixture(scope="module")
def runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("headrace_test_runner", ROOT / "tests/runner.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_pytest(folder: Path, ci: str) -> subprocess.CompletedProcess[str]:
    (folder / "pytest.ini").write_text("[pytest]\n")
    environment = os.environ | {"CI": ci, "PYTHONPATH": str(ROOT / "tests"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "plugins.no_skips", "-p", "no:cacheprovider", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, timeout=100)


def test_ci_turns_skips_into_failures_and_laptops_keep_them(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(SKIPS)
    laptop, ci = run_pytest(tmp_path, ""), run_pytest(tmp_path, "true")
    assert laptop.returncode == 0
    assert "1 passed, 2 skipped, 1 xfailed" in laptop.stdout
    assert ci.returncode == 1
    assert "1 failed, 1 passed, 1 xfailed, 1 error" in ci.stdout
    assert "no server here" in ci.stdout
    assert "no engine here" in ci.stdout


def test_ci_fails_a_module_that_skips_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text("import pytest\npytest.importorskip('no_such_library')\n")
    assert run_pytest(tmp_path, "true").returncode != 0


def test_tiers_run_in_order_and_stop_at_the_first_failure(
    runner: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[list[str]] = []

    def execute(command: list[str]) -> int:
        ran.append(command)
        return 1 if "tests/real" in command else 0

    assert runner.run(["lint", "fast", "real", "heavy"], execute, has_tests=lambda tier: True) == 1
    assert [command[3] for command in ran if "pytest" in command] == ["tests/fast", "tests/real"]
    assert all("--durations=20" in command for command in ran if "pytest" in command)
    assert "tests/test_architecture.py" in next(command for command in ran if "tests/fast" in command)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("tier ")]
    assert [line.split()[1:3] for line in lines] == [["lint", "passed"], ["fast", "passed"], ["real", "failed"]]


def test_a_tier_without_tests_fails(runner: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.run(["heavy"], lambda command: 0, has_tests=lambda tier: False) == 1
    assert "tests/heavy holds no test" in capsys.readouterr().out


def test_an_unknown_tier_is_refused(runner: ModuleType) -> None:
    with pytest.raises(SystemExit) as caught:
        runner.main(["quick"])
    assert caught.value.code == 2
