"""A whole small run through the real parts: Ray actors, an embedded server, the token door, files."""

import asyncio
import io
import json
from pathlib import Path

import pytest
import ray

from headrace.deploy import connections
from headrace.deploy.context import RunContext
from headrace.deploy.progress import PlainProgress, RunState
from headrace.deploy.runtime_ray import RayRuntime
from headrace.deploy.train import create_run, train
from headrace.platform.config import RunConfig
from headrace.platform.config.load import load_recipe
from headrace.platform.errors import ConfigError, HeadraceError
from headrace.platform.observability.metrics import read_metrics
from headrace.platform.observability.names import Metric
from headrace.platform.records.status import Fate
from headrace.platform.store.episodes import EpisodeStore
from headrace.platform.store.run_root import FOLDERS
from headrace.platform.store.tables import FateTable, ReceiptTable

RECIPES = Path(__file__).resolve().parents[2] / "deploy" / "recipes"
SMALL = (
    "model.tiny_llama=null",
    "sft=null",
    "learner.steps=4",
    "learner.batch_groups=4",
    "rollout.max_episodes=64",
    "eval.tasks=16",
)
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

pytestmark = pytest.mark.timeout(300)


def small(model: Path, runs_dir: Path, *changes: str) -> RunConfig:
    return load_recipe("lookup", [f"model.path={model}", f"runs_dir={runs_dir}", *SMALL, *changes], RECIPES)


async def carry(config: RunConfig, runtime_of=RayRuntime) -> tuple[dict, RunContext]:
    context, root = create_run(config)
    state = RunState(context.run)
    summary = await train(context, root, runtime_of(context), state, PlainProgress(state, io.StringIO()))
    return summary, context


@pytest.fixture(scope="module")
def finished(ray_session, lookup_model, tmp_path_factory):
    """One finished run with its own embedded server: summary and context."""
    return asyncio.run(carry(small(lookup_model, tmp_path_factory.mktemp("runs"), "runtime.kind=ray")))


class TestARunThroughRay:
    def test_the_equation_holds(self, finished):
        summary, _ = finished
        fates = summary["fates"]
        assert summary["equation_holds"]
        assert fates["dispatched"] == sum(fates[name] for name in SIX_FATES[1:])
        assert fates["in_flight"] == 0 and fates["trained"] > 0

    def test_the_summary_has_what_scripts_rely_on(self, finished):
        summary, context = finished
        assert set(summary) >= SUMMARY_KEYS
        assert set(summary["fates"]) >= set(SIX_FATES)
        assert summary["learner_steps"] == 4
        assert json.loads((Path(context.root) / "summary.json").read_text()) == summary

    def test_the_root_has_its_layout(self, finished):
        root = Path(finished[1].root)
        assert {path.name for path in root.iterdir()} == {
            *FOLDERS,
            "gateway",
            "control",
            "config.yaml",
            "summary.json",
            "metrics.jsonl",
            "best.json",
            "events.jsonl",
            "outbox",
        }
        for folder in FOLDERS:
            assert any((root / folder).iterdir()), f"{folder} is empty"
        assert (root / "figures" / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
        assert {path.stem for path in (root / "logs").iterdir()} >= {"learner", "replica-0", "rollout-0"}

    def test_every_metric_is_in_the_table(self, finished):
        records = list(read_metrics(str(Path(finished[1].root) / "metrics.jsonl")))
        assert {name for record in records for name in record} <= {metric.value for metric in Metric}
        assert [record["learner_step"] for record in records if record["stage"] == "rl"] == [1, 2, 3, 4]

    def test_every_attempt_has_one_final_fate_on_disk(self, finished):
        summary, context = finished
        rows = FateTable(context.root).by_episode().values()
        assert len(rows) == summary["fates"]["dispatched"]
        assert {fate: sum(row.fate is fate for row in rows) for fate in Fate} == {
            fate: summary["fates"][fate] for fate in Fate
        }

    def test_what_was_trained_is_stored_and_receipted_within_the_limit(self, finished):
        summary, context = finished
        receipts = ReceiptTable(context.root).by_episode()
        assert len(receipts) == summary["fates"]["trained"]
        assert max(rows[0].lag for rows in receipts.values()) == summary["lag_max_trained"] <= 4
        stored = {episode.episode_id for episode in EpisodeStore(context.root).iterate()}
        assert set(receipts) <= stored

    def test_nothing_of_it_is_left_in_ray(self, finished):
        run_id = finished[1].run
        actors = ray.util.list_named_actors(all_namespaces=True)
        assert not [actor for actor in actors if actor["namespace"].startswith(run_id)]


async def test_two_runs_on_one_server_do_not_meet(ray_session, valkey_url, lookup_model, tmp_path):
    configs = [small(lookup_model, tmp_path, f"queue.redis_url={valkey_url}", f"seed={seed}") for seed in (1, 2)]
    results = await asyncio.gather(*(carry(config) for config in configs))
    for summary, context in results:
        assert summary["equation_holds"] and summary["fates"]["in_flight"] == 0
        stored = list(EpisodeStore(context.root).iterate())
        assert {episode.attempt_id.run for episode in stored} == {context.run}
        assert len(FateTable(context.root).by_episode()) == summary["fates"]["dispatched"]
        assert not list((Path(context.root) / "queue").iterdir()), "no server of its own"


class TestWhatCannotStart:
    def test_a_cluster_without_a_server_for_it(self, lookup_model, tmp_path):  # case V4
        config = small(lookup_model, tmp_path, "runtime.ray_address=127.0.0.1:1")
        with pytest.raises(ConfigError, match=r"queue\.redis_url"):
            RayRuntime(RunContext(run="none", root=str(tmp_path), config=config))

    async def test_more_parts_than_processors(self, ray_session, lookup_model, tmp_path):
        config = small(lookup_model, tmp_path, "rollout.workers=64")
        with pytest.raises(ConfigError, match=r"66 CPUs .* 64 rollout workers"):
            await carry(config)
        (root,) = tmp_path.iterdir()
        assert "66 CPUs" in json.loads((root / "summary.json").read_text())["failed"]
        assert not list((root / "logs").iterdir()), "no part was started"

    async def test_a_server_that_is_not_there(self, ray_session, lookup_model, tmp_path, monkeypatch):
        monkeypatch.setattr(connections, "CONNECT_DEADLINE_S", 1.0)
        config = small(lookup_model, tmp_path, "queue.redis_url=unix:///no/such/socket")
        with pytest.raises(HeadraceError, match="/no/such/socket"):
            await carry(config)
