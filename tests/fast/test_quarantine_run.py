"""A whole run in which some tasks are broken: they are found, written down, told, and the run reaches its end (P27)."""

import pytest
from run_kit import run_inprocess, small_config, stored

from headrace.actors.environments.lookup import LookupEnvironment
from headrace.actors.quarantine import QuarantineFile
from headrace.platform.records import Purpose, Status

BROKEN = {f"k{n:02d}" for n in range(8)}


@pytest.fixture
def broken_world(monkeypatch):
    """Every task whose chain begins with one of the first keys has lost its store."""
    reset = LookupEnvironment._reset

    async def failing(self, task, seed):
        if task.data["chain"][0] in BROKEN:
            raise KeyError("store")
        return await reset(self, task, seed)

    monkeypatch.setattr(LookupEnvironment, "_reset", failing)


def test_broken_tasks_are_found_and_written_down_and_the_run_ends_well(lookup_model, tmp_path, broken_world):
    config = small_config(lookup_model, tmp_path / "runs", "queue.max_failure_rate=0.9", "learner.steps=3")
    summary, root = run_inprocess(config)
    rows = QuarantineFile(root.url).read({})
    trained = [episode for episode in stored(root) if episode.purpose is Purpose.TRAIN]
    faulty = {episode.task.task_id for episode in trained if episode.status is Status.ENV_BUG}
    assert summary["learner_steps"] == 3
    assert summary["equation_holds"]
    assert summary["quarantined"] == len(rows) > 0
    assert {row.task_id for row in rows} <= faulty
    assert all("its demonstration fails" in row.reason and "store" in row.reason for row in rows)
    assert not [episode for episode in trained if episode.status is Status.OK and episode.task.task_id in faulty]
