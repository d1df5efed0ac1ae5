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


def run_pytest(folder: Path, ci: str, *more: str) -> subprocess.CompletedProcess[str]:
    (folder / "pytest.ini").write_text("[pytest]\n")
    environment = os.environ | {"CI": ci, "PYTHONPATH": str(ROOT / "tests"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "plugins.no_skips", "-p", "no:cacheprovider", *more, str(folder)]
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
    ran: list[list[list[str]]] = []

    def execute(commands: list[list[str]]) -> bool:
        ran.append(commands)
        return "tests/real" not in commands[0]

    assert runner.run(["lint", "fast", "real", "heavy"], execute, has_tests=lambda tier: True) == 1
    lint, *tiers = ran
    assert [Path(command[0]).name for command in lint] == ["ruff", "ruff", "mypy"]
    assert [[command[3] for command in lanes] for lanes in tiers] == [
        ["tests/fast"] * runner.LANES,
        ["tests/real"],
    ]
    for lanes in tiers:
        assert all(lane == lanes[0] and "--durations=20" in lane for lane in lanes)
        assert any(word.startswith("--lanes=") for word in lanes[0])
    assert "tests/test_architecture.py" in tiers[0][0]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("tier ")]
    assert [line.split()[1:3] for line in lines] == [["lint", "passed"], ["fast", "passed"], ["real", "failed"]]


def test_a_tier_without_tests_fails(runner: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.run(["heavy"], lambda commands: True, has_tests=lambda tier: False) == 1
    assert "tests/heavy holds no test" in capsys.readouterr().out


def test_a_tier_holds_when_every_lane_does(runner: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = [sys.executable, "-c", "print('fine')"], [sys.executable, "-c", "raise SystemExit('broken')"]
    assert runner.execute([good, good])
    assert not runner.execute([bad, good]) and not runner.execute([good, bad])
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == ["1| broken", "1| fine", "1| fine", "2| broken", "2| fine", "2| fine"]


SHARED = """
import pytest
@pytest.fixture(scope="session")
def session(): yield; print("\\nsession ends")
@pytest.fixture(scope="module")
def module(session): yield; print("\\nmodule ends")
def test_one(module): pass
def test_two(module): {last}
"""


def test_lanes_share_the_files_of_a_tier(tmp_path: Path) -> None:
    """Each runs once and whole, the longest first; what a session shares ends with it, what a file shares before."""
    claims, heavy = tmp_path / "claims", tmp_path / "heavy"
    claims.mkdir()
    heavy.mkdir()
    for file in ("heavy/test_a.py", "heavy/test_b.py", "heavy/test_kills.py", "test_z.py"):
        (tmp_path / file).write_text(SHARED.format(last="pass"))
    alone = run_pytest(tmp_path, "", "-p", "plugins.lanes", f"--lanes={claims}", "-sv")
    said = [line.split("::")[0] for line in alone.stdout.splitlines() if "::" in line or "ends" in line]
    files = ["heavy/test_kills.py", "heavy/test_a.py", "heavy/test_b.py", "test_z.py"]
    assert said == [each for file in files for each in (file, file, "module ends")] + ["session ends"] * 4
    assert "8 passed" in alone.stdout and len(list(claims.iterdir())) == 4
    late = run_pytest(tmp_path, "", "-p", "plugins.lanes", f"--lanes={claims}")
    assert late.returncode == 0 and "no tests ran" in late.stdout, "all is claimed"
    next(claims.glob("test_b-*")).unlink()
    (heavy / "test_b.py").write_text(SHARED.format(last="assert False"))
    failed = run_pytest(tmp_path, "", "-p", "plugins.lanes", f"--lanes={claims}")
    assert failed.returncode == 1 and "1 failed, 1 passed" in failed.stdout
    (heavy / "test_c.py").write_text("broken")
    broken = run_pytest(tmp_path, "", "-p", "plugins.lanes", f"--lanes={claims}")
    assert broken.returncode == 2 and not list(claims.glob("test_c-*")), "nothing is run of what cannot be collected"


def test_an_unknown_tier_is_refused(runner: ModuleType) -> None:
    with pytest.raises(SystemExit) as caught:
        runner.main(["quick"])
    assert caught.value.code == 2
