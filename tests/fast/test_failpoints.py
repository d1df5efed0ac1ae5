"""An armed point kills one process, once; one that is not armed does nothing."""

import signal
import subprocess
import sys

import pytest

from headrace.platform.testing.failpoints import FOLDER_VARIABLE, arm, failpoint

PASSING = "from headrace.platform.testing.failpoints import failpoint; failpoint('after_blob')"


def test_an_armed_point_kills_whoever_passes_first_and_nobody_after(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    arm(tmp_path, "after_blob")
    ended = [subprocess.run([sys.executable, "-c", PASSING], check=False).returncode for _ in range(2)]
    assert ended == [-signal.SIGKILL, 0]


def test_without_the_variable_or_the_file_nothing_happens(tmp_path, monkeypatch):
    failpoint("after_blob")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    failpoint("after_blob")


def test_only_points_that_exist_can_be_armed(tmp_path):
    with pytest.raises(ValueError, match="after_blob"):
        arm(tmp_path, "after_blub")
