"""Going on with a run: what is restored, what may be changed, and that a resume which is refused changes nothing."""

import asyncio
import io
import json
import shutil
from pathlib import Path

import pytest
from run_kit import run_inprocess, small_config

from headrace.deploy.progress import PlainProgress, RunState
from headrace.deploy.resume import open_run, take_up
from headrace.deploy.runtime_inprocess import InprocessRuntime
from headrace.deploy.train import train
from headrace.platform.config.yaml_text import parse_yaml
from headrace.platform.errors import ConfigError, RunFailed
from headrace.platform.observability.metrics import read_metrics
from headrace.platform.records.status import Fate
from headrace.platform.store.run_root import RunRoot
from headrace.platform.store.tables import FateTable


@pytest.fixture(scope="module")
def finished(lookup_model, tmp_path_factory) -> Path:
    """A run of three steps that has come to its end."""
    changes = ("queue.max_lag=2", "learner.checkpoint_every=2", "learner.publish_every=1")
    _, root = run_inprocess(small_config(lookup_model, tmp_path_factory.mktemp("runs"), *changes))
    return Path(root.url)


@pytest.fixture
def root(finished, tmp_path) -> RunRoot:
    return RunRoot(str(shutil.copytree(finished, tmp_path / "runs" / finished.name)))


def resume(root: RunRoot, *overrides: str) -> dict:
    context, root = open_run(root.url.rsplit("/", 1)[0], root.name, overrides)
    state = RunState(context.run)
    runtime = InprocessRuntime(context)
    return asyncio.run(train(context, root, runtime, state, PlainProgress(state, io.StringIO()), take_up(root)))


def trained(root: RunRoot) -> list[str]:
    """Every slot that a manifest on the way to the newest version trained."""
    manifests = {
        number: json.loads(file.read_text())
        for file in Path(root.url, "versions").glob("*.json")
        for number in [int(file.stem)]
    }
    slots, version = [], max(manifests)
    while version is not None:
        consumed = manifests[version].get("consumed", {})
        slots += [name.rsplit(".", 1)[0] for name, fate in consumed.items() if fate == Fate.TRAINED]
        version = manifests[version]["parent"]
    return slots


def test_more_steps_go_on_from_where_the_run_was(root):  # P6
    before, seconds = root.read_summary(), take_up(root).seconds
    summary = resume(root, "learner.steps=5")
    assert (summary["learner_steps"], summary["equation_holds"]) == (5, True)
    assert summary["success_before"] == before["success_before"], "it was not measured again"
    assert summary["seconds"] > seconds > 0
    steps = [record["learner_step"] for record in read_metrics(root.metrics) if "loss" in record]
    assert steps == [1, 2, 3, 4, 5], "the run had settled its last step"
    assert len(trained(root)) == len(set(trained(root))), "no slot is trained twice (P1)"
    assert summary["fates"]["trained"] == len(trained(root))
    fates = FateTable(root.url).by_episode().values()
    assert sum(row.fate is Fate.TRAINED for row in fates) == len(trained(root))
    assert parse_yaml(root.read_config())["learner"]["steps"] == 5


def test_a_run_that_died_after_its_last_step_is_only_finished(root):
    Path(root.summary).unlink()
    summary = resume(root)
    assert (summary["learner_steps"], summary["fates"]["in_flight"], summary["equation_holds"]) == (3, 0, True)
    assert summary["success_after"] is not None
    assert "trained_by_length" in summary


def test_a_finished_run_says_how_to_go_on(root):
    with pytest.raises(ConfigError, match=r"is finished: 3 of learner.steps=3 .* learner.steps=6"):
        open_run(root.url.rsplit("/", 1)[0], root.name, [])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("queue.max_lag=0", "max_lag from 2 to 0"),
        ("queue.over_lag=mask", "mask_over_lag from False to True"),
        ("learner.algorithm.group_size=4", "group_size from 8 to 4"),
        ("learner.batch_groups=8", "batch_groups from 4 to 8"),
    ],
)
def test_the_limits_of_the_queue_stay(root, change, told):
    """P5, P14: what is settled would be judged anew."""
    kept = {name: Path(root.url, name).read_bytes() for name in ("config.yaml", "summary.json", "metrics.jsonl")}
    with pytest.raises(ConfigError, match=f"you change {told}"):
        open_run(root.url.rsplit("/", 1)[0], root.name, [change, "learner.steps=5"])
    assert {name: Path(root.url, name).read_bytes() for name in kept} == kept


def test_a_resume_that_never_began_leaves_the_run_as_it_was(root, monkeypatch):
    async def refused(self, model_dir):
        raise RunFailed("no such luck")

    kept = {name: Path(root.url, name).read_bytes() for name in ("config.yaml", "summary.json", "metrics.jsonl")}
    monkeypatch.setattr(InprocessRuntime, "begin", refused)
    with pytest.raises(RunFailed, match="no such luck"):
        resume(root, "learner.steps=5")
    assert {name: Path(root.url, name).read_bytes() for name in kept} == kept


def test_the_best_version_outlives_a_resume(root):
    best = {**root.read_best(), "score": 2.0}
    root.write_best(best)
    summary = resume(root, "learner.steps=8", "learner.checkpoint_every=1", "learner.keep_versions=1")
    assert summary["best"]["version"] == best["version"]
    assert list(Path(root.url, "versions").glob(f"f*-v{best['version']:06d}/model.safetensors"))
