"""`headrace study credit`: real runs, side by side."""

import json
import subprocess

import pytest
from command_line import HEADRACE, SMALL_RUN, environment


@pytest.mark.timeout(300)
def test_two_algorithms_are_run_and_drawn(lookup_model, tmp_path):
    command = [*HEADRACE, "study", "credit", "--seeds", "1", "--steps", "4", "--only", "grpo", "--only", "rloo"]
    small = [change for change in SMALL_RUN if not change.startswith("learner.steps")]
    changes = [*small, f"model.path={lookup_model}"]
    done = subprocess.run(
        [*command, "--out", "mine", "--json", *changes],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    runs = json.loads(done.stdout.splitlines()[-1])["credit"]["runs"]
    assert [(run["condition"], run["seed"]) for run in runs] == [("grpo", 0), ("rloo", 0)]
    assert all(len(run["curve"]) == 4 and 0 < run["after"] <= 1 for run in runs)
    assert len({run["before"] for run in runs}) == 1  # the same weights, the same evaluation
    assert (tmp_path / "mine" / "credit.png").stat().st_size > 10_000
    assert len(list((tmp_path / "mine" / "runs").iterdir())) == 2
