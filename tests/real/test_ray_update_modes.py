"""Runs through Ray in which episodes meet new weights: what they say of it, and that the lag limit holds."""

import asyncio
import io
from pathlib import Path

import pytest

from headrace.deploy.progress import PlainProgress, RunState
from headrace.deploy.runtime_ray import RayRuntime
from headrace.deploy.train import create_run, train
from headrace.platform.config.load import load_recipe
from headrace.platform.fidelity import check_episode
from headrace.platform.records.status import Purpose, UpdateMode
from headrace.platform.store.episodes import EpisodeStore
from headrace.platform.store.tables import ReceiptTable

RECIPES = Path(__file__).resolve().parents[2] / "deploy" / "recipes"
LAG = 4
SMALL = (
    "model.tiny_llama=null",
    "sft=null",
    "learner.steps=6",
    "learner.batch_groups=4",
    "rollout.max_episodes=64",
    "eval.tasks=8",
    f"queue.max_lag={LAG}",
)

pytestmark = pytest.mark.timeout(300)


async def carry(model: Path, runs_dir: Path, mode: UpdateMode) -> tuple[dict, str]:
    changes = [f"model.path={model}", f"runs_dir={runs_dir}", f"rollout.update_mode={mode}", "runtime.kind=ray", *SMALL]
    context, root = create_run(load_recipe("lookup", changes, RECIPES))
    state = RunState(context.run)
    summary = await train(context, root, RayRuntime(context), state, PlainProgress(state, io.StringIO()))
    return summary, context.root


@pytest.fixture(scope="module", params=[UpdateMode.TURN, UpdateMode.INFLIGHT])
def finished(request, ray_session, lookup_model, tmp_path_factory):
    """A finished run: its mode, summary, and stored training and evaluation episodes."""
    mode = request.param
    summary, root = asyncio.run(carry(lookup_model, tmp_path_factory.mktemp("runs"), mode))
    episodes = list(EpisodeStore(root).iterate())
    train = [episode for episode in episodes if episode.purpose is Purpose.TRAIN]
    evaluated = [episode for episode in episodes if episode.purpose is Purpose.EVAL]
    return mode, summary, root, train, evaluated


def test_nothing_is_lost_and_the_lag_limit_holds(finished):  # P14
    _, summary, root, _, _ = finished
    assert summary["equation_holds"] and summary["fates"]["in_flight"] == 0
    assert summary["learner_steps"] == 6
    receipts = ReceiptTable(root).by_episode()
    assert len(receipts) == summary["fates"]["trained"] > 0
    assert max(rows[0].lag for rows in receipts.values()) == summary["lag_max_trained"] <= LAG


def test_no_episode_is_lost_to_the_modes(finished):
    _, summary, _, _, _ = finished
    assert summary["fates"]["failed"] == 0
    assert "dropped:fidelity" not in summary["fates"]


def test_episodes_say_which_weights_sampled_what(finished):  # case S1
    mode, _, _, train, evaluated = finished
    assert {episode.update_mode for episode in train} == {mode}
    for episode in train:
        check_episode(episode)
        assert episode.oldest_version >= episode.version.number
    assert any(episode.newest_version > episode.oldest_version for episode in train), "no episode met new weights"
    assert {episode.update_mode for episode in evaluated} == {UpdateMode.STICKY}
    assert all(episode.oldest_version == episode.newest_version == episode.version.number for episode in evaluated)
