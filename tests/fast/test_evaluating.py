"""Evaluation while a run trains: pinned versions, the best one kept, faults that do not end it, samples to read."""

import json
from pathlib import Path

import pytest
from run_kit import run_inprocess, small_config, stored

from headrace.deploy.runtime_inprocess import InprocessRuntime
from headrace.platform.errors import RunFailed
from headrace.platform.observability.metrics import read_metrics
from headrace.platform.observability.names import Metric
from headrace.platform.records.status import Purpose
from headrace.platform.store.evaluations import EvaluationStore

EVERY_STEP = ("eval.every=1", "eval.samples=2", "learner.steps=4", "learner.keep_versions=1", "eval.tasks=8")


@pytest.fixture(scope="module")
def run(lookup_model, tmp_path_factory):
    return run_inprocess(small_config(lookup_model, tmp_path_factory.mktemp("runs"), *EVERY_STEP))


def evaluations(root):
    store = EvaluationStore(root.url)
    return [store.read(name) for name in store.names()]


def test_every_version_is_evaluated_once_on_the_same_tasks_and_seeds(run):
    _, root = run
    found = evaluations(root)
    assert [each.version for each in found] == [0, 1, 2, 3, 4]
    played = {tuple((o.task_id, o.seed, o.sample) for o in each.outcomes) for each in found}
    assert len(played) == 1
    assert len(next(iter(played))) == 8 * 2


def test_evaluation_episodes_are_of_the_evaluated_version_and_apart_from_training(run):
    _, root = run
    episodes = stored(root)
    version_of = {o.episode_id: each.version for each in evaluations(root) for o in each.outcomes}
    evaluated = [e for e in episodes if e.purpose is Purpose.EVAL]
    assert {e.episode_id: e.version.number for e in evaluated} == version_of
    assert {span.version.number for e in evaluated for turn in e.turns for span in turn.version_spans} <= {
        0,
        1,
        2,
        3,
        4,
    }
    trained = {(e.task.task_id, e.seed) for e in episodes if e.purpose is Purpose.TRAIN}
    assert trained.isdisjoint((e.task.task_id, e.seed) for e in evaluated)  # case V2
    assert {e.task.split for e in evaluated} == {"dev"}


def test_the_best_version_is_named(run):
    summary, root = run
    means = {}
    for each in evaluations(root):
        scores = [o.score for o in each.outcomes]
        means[each.version] = round(sum(scores) / len(scores), 4)
    best = max(means, key=lambda version: (means[version], -version))
    assert summary["best"] == {"version": best, "success": means[best], "score": means[best]}
    assert root.read_best() == {
        **summary["best"],
        "evaluation": next(each.name for each in evaluations(root) if each.version == best),
    }
    assert (summary["success_before"], summary["success_after"]) == (means[0], means[4])
    assert (summary["score_before"], summary["score_after"]) == (means[0], means[4])


def test_metrics_have_the_figures(run):
    _, root = run
    records = [record for record in read_metrics(root.metrics) if Metric.EVAL_VERSION in record]
    assert [record[Metric.EVAL_VERSION] for record in records] == [0, 1, 2, 3, 4]
    for record in records:
        assert record[Metric.EVAL_LOW] <= record[Metric.EVAL_SCORE] <= record[Metric.EVAL_HIGH]
        assert set(record[Metric.EVAL_PASS_HAT]) == {"1", "2"}
        assert record[Metric.EVAL_BY_ENVIRONMENT] == {"lookup": record[Metric.EVAL_SUCCESS]}
    steps = [record for record in read_metrics(root.metrics) if Metric.LOSS in record]
    counts = [record[Metric.EPISODES_BY_ENVIRONMENT]["lookup"] for record in steps]
    assert counts == sorted(counts)
    assert counts[0] > 0
    assert all(0 <= record[Metric.SUCCESS_BY_ENVIRONMENT]["lookup"] <= 1 for record in steps)
    assert [record[Metric.SEGMENTS_OPENED] for record in steps] == [0, 0, 0, 0]


def test_some_episodes_are_there_to_read(lookup_model, tmp_path):
    _, root = run_inprocess(small_config(lookup_model, tmp_path, "log_samples={every: 2, n: 2}", "learner.steps=4"))
    files = sorted((Path(root.url) / "logs" / "samples").iterdir())
    assert [file.name for file in files] == ["step-000002.md", "step-000004.md"]
    text = files[0].read_text()
    assert "find k" in text
    assert "2 episodes" in text
    _, quiet = run_inprocess(small_config(lookup_model, tmp_path / "other", "log_samples=null"))
    assert not (Path(quiet.url) / "logs" / "samples").exists()


def test_an_evaluation_that_fails_while_training_goes_on_does_not_end_the_run(lookup_model, tmp_path, monkeypatch):
    real = InprocessRuntime.evaluate

    async def sometimes(self, version, *rest):
        if version == 2:
            raise RunFailed("no place for version 2")
        return await real(self, version, *rest)

    monkeypatch.setattr(InprocessRuntime, "evaluate", sometimes)
    summary, root = run_inprocess(small_config(lookup_model, tmp_path, *EVERY_STEP))
    assert summary["learner_steps"] == 4
    assert [each.version for each in evaluations(root)] == [0, 1, 3, 4]
    assert "failed" not in json.loads(Path(root.summary).read_text())


def test_the_weights_of_the_best_version_outlive_retention(lookup_model, tmp_path, monkeypatch):
    """Versions 1 and 2 are evaluated, 1 is the best; three versions later only 1 is kept besides the newest."""
    kept = []
    real = InprocessRuntime.keep

    async def recorded(self, versions):
        kept.append(list(versions))
        await real(self, versions)

    monkeypatch.setattr(InprocessRuntime, "keep", recorded)
    _, root = run_inprocess(small_config(lookup_model, tmp_path, *EVERY_STEP))
    best = root.read_best()["version"]
    after = [versions for versions in kept if best in versions]
    assert kept.index(after[0]) + len(after) == len(kept)  # from the moment it is evaluated it is always among them
