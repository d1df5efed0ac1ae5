"""What `headrace status` says of a run that goes on, has ended, or was killed."""

import json
import time

import pytest
from run_kit import RECIPES
from typer.testing import CliRunner

from headrace.deploy.cli import app
from headrace.deploy.status import run_status
from headrace.platform.config.load import dump_yaml, load_recipe
from headrace.platform.observability.metrics import MetricsFile
from headrace.platform.observability.names import Metric
from headrace.platform.observability.parts import SILENT_AFTER_S, Part
from headrace.platform.store.events import Events, RunEvent
from headrace.platform.store.run_root import RunRoot


@pytest.fixture
def root(tmp_path) -> RunRoot:
    root = RunRoot.create(str(tmp_path), "lookup-1", dump_yaml(load_recipe("lookup", ["learner.steps=40"], RECIPES)))
    Events(root.url, time.time).add(RunEvent.STARTED)
    return root


def say(root: RunRoot, name: str, state: str, waiting_for: str = "", **detail) -> None:
    part = Part(root.url, name)
    part.set(state, waiting_for)
    part.note(**detail)
    part._write()


def test_each_part_says_what_it_waits_for_and_since_when(root, tmp_path):
    say(root, "driver", "reinforcement learning")
    say(root, "learner", "training step 7", "a batch of 16 groups (3 ready, 20 being played)")
    say(root, "rollout-0", "playing 160 episodes", ledger="waits for the server for 3 s")
    MetricsFile(root.metrics, time.time).append(
        {Metric.LOSS: 0.1, Metric.LEARNER_STEP: 7, Metric.POLICY_VERSION: 7, Metric.GROUPS_READY: 3}
    )
    later = time.time() + 4
    facts = run_status(root, later)
    assert (facts["state"], facts["step"], facts["steps"], facts["version"]) == ("running", 7, 40, 7)
    learner = next(part for part in facts["parts"] if part["part"] == "learner")
    assert learner["waiting_for"].startswith("a batch of 16 groups")
    assert 4 <= learner["for_s"] < 6
    assert not learner["silent"]
    shown = CliRunner().invoke(app, ["status", "lookup-1", "--runs-dir", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert "lookup-1: running, learner step 7 of 40, version 7" in shown.output
    assert "waiting for a batch of 16 groups" in shown.output
    assert "waits for the server for 3 s" in shown.output


def test_a_run_whose_driver_fell_silent_was_killed_and_can_be_resumed(root, tmp_path):
    say(root, "driver", "reinforcement learning")
    facts = run_status(root, time.time() + SILENT_AFTER_S + 1)
    assert facts["state"] == "killed"
    assert facts["parts"][0]["silent"]
    root_without_parts = run_status(RunRoot.find(str(tmp_path), "lookup"), time.time() + 1e6)
    assert root_without_parts["state"] == "killed"


@pytest.mark.parametrize(
    ("summary", "state"),
    [({"failed": ""}, "finished"), ({"failed": "interrupted"}, "interrupted"), ({"failed": "no batch"}, "failed")],
)
def test_a_run_that_said_goodbye(root, tmp_path, summary, state):
    root.write_summary(summary)
    Events(root.url, time.time).add(RunEvent.ENDED, cause=summary["failed"])
    result = CliRunner().invoke(app, ["status", "lookup", "--runs-dir", str(tmp_path), "--json"])
    facts = json.loads(result.output.splitlines()[-1])
    assert facts["state"] == state
    told = CliRunner().invoke(app, ["status", "lookup", "--runs-dir", str(tmp_path)]).output
    assert ("--resume lookup-1" in told) == (state != "finished")
