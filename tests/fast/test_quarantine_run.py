"""A whole run in which some tasks are broken: they are found, written down, told, and the run reaches its end (P27)."""

import asyncio
import io
import json
from pathlib import Path

import pytest
from run_kit import run_inprocess, small_config, stored

from headrace.actors.environments.lookup import LookupEnvironment, LookupTasks
from headrace.actors.quarantine import QuarantineFile
from headrace.deploy.progress import PlainProgress, RunState
from headrace.deploy.resume import open_run, take_up
from headrace.deploy.runtime_inprocess import InprocessRuntime
from headrace.deploy.train import train
from headrace.platform.records import Purpose, Status

BROKEN = {f"k{n:02d}" for n in range(8)}


@pytest.fixture
def broken_world(monkeypatch):
    break_worlds(monkeypatch)


def break_worlds(patch):
    """Every task whose chain begins with one of the first keys has lost its store."""
    reset = LookupEnvironment._reset

    async def failing(self, task, seed):
        if task.data["chain"][0] in BROKEN:
            raise KeyError("store")
        return await reset(self, task, seed)

    patch.setattr(LookupEnvironment, "_reset", failing)


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


def few_tasks(folder):
    """A file of tasks that come again and again; the first keys of some are `BROKEN`."""
    tasks = {task.data["chain"][0]: task.data for task in LookupTasks("train", 5, [1]).next(400)}
    rows = [tasks[f"k{n:02d}"] for n in range(4, 16)]
    (folder / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"environments.lookup.tasks={{source: {folder}/few.jsonl, dev_share: 0.2, hidden_share: 0}}"


def resume(root, *overrides):
    context, root = open_run(str(Path(root.url).parent), root.name, overrides)
    state = RunState(context.run)
    runtime = InprocessRuntime(context)
    return asyncio.run(train(context, root, runtime, state, PlainProgress(state, io.StringIO()), take_up(root)))


def test_what_is_out_stays_out_after_a_resume(lookup_model, tmp_path):
    """The world is whole again by then, under the same version: only the file keeps its tasks from being played."""
    limits = ("queue.max_failure_rate=0.9", "learner.steps=2", "learner.checkpoint_every=1", "eval.tasks=2")
    config = small_config(lookup_model, tmp_path / "runs", few_tasks(tmp_path), "environments.lookup.args={}", *limits)
    with pytest.MonkeyPatch.context() as patch:
        break_worlds(patch)
        _, root = run_inprocess(config)
    out = {row.task_id for row in QuarantineFile(root.url).read()}
    before = {episode.episode_id for episode in stored(root)}
    assert out
    summary = resume(root, "learner.steps=5")
    after = [episode for episode in stored(root) if episode.episode_id not in before]
    trained = [episode.task.task_id for episode in after if episode.purpose is Purpose.TRAIN]
    assert (summary["learner_steps"], summary["quarantined"], summary["equation_holds"]) == (5, len(out), True)
    assert len(trained) > 12 * 8 and not out & set(trained)
    assert sorted(row.task_id for row in QuarantineFile(root.url).read()) == sorted(out), "each is written once"
