"""The runtime without Ray or a server: the same seed gives the same run to the last digit, and the books close."""

import json
from pathlib import Path

import pytest
from run_kit import RECIPES, run_inprocess, small_config, stored

from headrace.platform.config.load import load_recipe
from headrace.platform.observability.metrics import read_metrics
from headrace.platform.observability.names import Metric
from headrace.platform.records.episode import Episode
from headrace.platform.records.status import Purpose
from headrace.platform.store.run_root import FOLDERS
from headrace.platform.store.tables import FateTable, ReceiptTable, RewardTable

SUMMARY_KEYS = {
    "run",
    "success_before",
    "success_after",
    "seconds",
    "learner_steps",
    "lag_max_trained",
    "lag_share_ge1",
    "fates",
    "overlap",
}
SIX_FATES = ("dispatched", "trained", "dropped", "failed", "cancelled", "in_flight")


@pytest.fixture(scope="module")
def run(lookup_model, tmp_path_factory):
    """One finished run: its summary and its root."""
    return run_inprocess(small_config(lookup_model, tmp_path_factory.mktemp("runs")))


def played(episode: Episode) -> tuple:
    """Everything of an episode that must not depend on when and under which name its run was played."""
    attempt = episode.attempt_id
    return (
        (attempt.purpose, attempt.group, attempt.sample, attempt.attempt),
        (episode.task, episode.seed, episode.version.number, episode.status, episode.stop_reason),
        episode.final_state_hash,
        tuple(
            (
                turn.role,
                turn.token_ids.tobytes(),
                turn.action_mask.tobytes(),
                turn.behaviour_logprobs.tobytes(),
                turn.observation_hash,
                turn.state_hash,
                turn.seed,
            )
            for turn in episode.turns
        ),
    )


def losses(root) -> list:
    return [
        (record[Metric.LOSS], record[Metric.KL], record[Metric.GRAD_NORM], record[Metric.LAG])
        for record in read_metrics(root.metrics)
        if Metric.LOSS in record
    ]


class TestDeterminism:
    def test_the_same_seed_gives_the_same_run(self, run, lookup_model, tmp_path):
        summary, root = run
        again, twin = run_inprocess(small_config(lookup_model, tmp_path))
        assert [played(e) for e in stored(root)] == [played(e) for e in stored(twin)]
        assert losses(root) == losses(twin)
        assert len(losses(root)) == 3
        same = ("success_before", "success_after", "fates", "lag_max_trained", "lag_share_ge1")
        assert {key: summary[key] for key in same} == {key: again[key] for key in same}

    def test_another_seed_differs(self, run, lookup_model, tmp_path):
        _, root = run
        _, other = run_inprocess(small_config(lookup_model, tmp_path, "seed=1"))
        assert losses(root) != losses(other)
        here, there = stored(root), stored(other)
        assert not {e.task.task_id + str(e.seed) for e in here} & {e.task.task_id + str(e.seed) for e in there}

    def test_members_of_a_group_share_the_world_but_not_the_dice(self, run):
        _, root = run
        groups: dict[int, list[Episode]] = {}
        for episode in stored(root):
            if episode.purpose is Purpose.TRAIN:
                groups.setdefault(episode.attempt_id.group, []).append(episode)
        assert all(len({(e.task.task_id, e.seed) for e in group}) == 1 for group in groups.values())
        assert any(len({played(e)[3] for e in group}) > 1 for group in groups.values())


class TestTheBooks:
    def test_the_equation_holds_and_nothing_is_in_flight(self, run):
        summary, _ = run
        fates = summary["fates"]
        assert summary["equation_holds"]
        assert fates["dispatched"] == sum(fates[name] for name in SIX_FATES[1:])
        assert fates["in_flight"] == 0 and fates["trained"] > 0

    def test_every_attempt_has_one_final_fate(self, run):
        summary, root = run
        rows = FateTable(root.url).by_episode().values()
        assert len(rows) == summary["fates"]["dispatched"]
        counted = {kind: sum(row.fate == kind for row in rows) for kind in SIX_FATES[1:]}
        assert counted == {kind: summary["fates"][kind] for kind in SIX_FATES[1:]}

    def test_every_trained_episode_has_a_receipt_a_reward_and_its_version(self, run):
        _, root = run
        receipts, rewards = ReceiptTable(root.url).by_episode(), RewardTable(root.url).by_episode()
        trained = {row.episode_id: row for row in FateTable(root.url).by_episode().values() if row.fate == "trained"}
        assert set(receipts) == set(trained)
        for episode_id, row in trained.items():
            assert receipts[episode_id][0].version == row.version
            assert rewards[episode_id]

    def test_receipts_add_up_to_the_summary(self, run):
        summary, root = run
        lags = [rows[0].lag for rows in ReceiptTable(root.url).by_episode().values()]
        assert max(lags) == summary["lag_max_trained"]
        assert sum(lag >= 1 for lag in lags) / len(lags) == pytest.approx(summary["lag_share_ge1"], abs=1e-4)


class TestWhatIsLeft:
    def test_the_summary_has_what_scripts_rely_on(self, run):
        summary, root = run
        assert set(summary) >= SUMMARY_KEYS
        assert set(summary["fates"]) >= set(SIX_FATES)
        assert json.loads(Path(root.summary).read_text()) == summary
        assert summary["learner_steps"] == 3
        assert 0 <= summary["overlap"] <= 1

    def test_the_root_has_its_layout_and_nothing_else(self, run):
        _, root = run
        names = {path.name for path in Path(root.url).iterdir()}
        assert names == {
            *FOLDERS,
            "gateway",
            "config.yaml",
            "summary.json",
            "metrics.jsonl",
            "events.jsonl",
            "best.json",
        }
        assert (Path(root.url) / "figures" / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
        assert list((Path(root.url) / "checkpoints").glob("*/manifest.json"))

    def test_the_stored_configuration_is_the_run(self, run, lookup_model, tmp_path):
        _, root = run
        config = load_recipe(root.join("config.yaml"), [], RECIPES)
        assert config == small_config(lookup_model, Path(root.url).parent)

    def test_every_metric_is_in_the_table(self, run):
        _, root = run
        records = list(read_metrics(root.metrics))
        assert {name for record in records for name in record} <= {metric.value for metric in Metric}
        assert [record.get("stage") for record in records] == ["eval", "sft", "rl", "rl", "rl", "eval"]


def test_at_limit_zero_nothing_older_is_trained(lookup_model, tmp_path):  # case Q12
    summary, root = run_inprocess(small_config(lookup_model, tmp_path, "queue.max_lag=0", "learner.steps=5"))
    assert summary["learner_steps"] == 5
    assert summary["lag_max_trained"] == 0
    assert {rows[0].lag for rows in ReceiptTable(root.url).by_episode().values()} == {0}


def test_it_learns(lookup_model, tmp_path):
    summary, _ = run_inprocess(
        small_config(lookup_model, tmp_path, "learner.steps=14", "learner.batch_groups=12", "eval.tasks=128")
    )
    assert summary["success_after"] > summary["success_before"] + 0.2


def test_a_run_that_breaks_leaves_its_cause(lookup_model, tmp_path, monkeypatch):
    from headrace.deploy.runtime_inprocess import InprocessRuntime

    async def broken(self):
        raise ZeroDivisionError("no more steps")

    monkeypatch.setattr(InprocessRuntime, "step", broken)
    with pytest.raises(ZeroDivisionError):
        run_inprocess(small_config(lookup_model, tmp_path))
    (folder,) = tmp_path.iterdir()
    left = json.loads((folder / "summary.json").read_text())
    assert "no more steps" in left["failed"]
    assert left["equation_holds"]
