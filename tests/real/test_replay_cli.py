"""`headrace inspect`, `replay` and `suite` as processes, on what a run through Ray left behind."""

import json
import shutil

import pytest
from command_line import last_json, run

from headrace.platform.records.status import Purpose, Role
from headrace.platform.store.episodes import EpisodeStore
from headrace.platform.store.tables import FateTable

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def trained(small_run, tmp_path_factory):
    """A folder of our own in which a run was made by the command line, and its summary."""
    folder = tmp_path_factory.mktemp("work") / "copy"
    shutil.copytree(small_run, folder, symlinks=True)
    return folder, json.loads((folder / "summary.json").read_text())


def test_the_run_lies_under_runs_by_its_name(trained):
    folder, summary = trained
    assert json.loads((folder / "runs" / summary["run"] / "summary.json").read_text()) == summary


def test_inspect_shows_words_fates_and_trained_tokens(trained):
    folder, summary = trained
    code, out, err = run(folder, "inspect", "lookup", "--json", timeout_s=60)
    assert code == 0, err
    facts = last_json(out)
    assert facts["summary"] == summary
    root = str(folder / "runs" / summary["run"])
    episode_id = next(row.episode_id for row in FateTable(root).by_episode().values() if row.fate == "trained")
    code, out, err = run(folder, "inspect", "lookup", episode_id, "--json", timeout_s=60)
    assert code == 0, err
    facts = last_json(out)
    tokens = [token for turn in facts["turns"] for token in turn["tokens"]]
    assert {token["kind"] for token in tokens} == {"prompt", "trained"}
    assert "find" in "".join(token["text"] for token in tokens)
    assert facts["fate"] == "trained"


def test_episodes_played_elsewhere_replay_equal_here(trained):
    folder, summary = trained
    episodes = list(EpisodeStore(str(folder / "runs" / summary["run"])).iterate())
    chosen = [
        next(e for e in episodes if e.purpose is purpose and len(e.turns) > 3)
        for purpose in (Purpose.TRAIN, Purpose.EVAL)
    ]
    for episode in chosen:
        code, out, err = run(folder, "replay", "lookup", episode.episode_id, "--json", timeout_s=60)
        assert code == 0, err
        report = last_json(out)
        assert report["equal"] and report["steps"] == sum(turn.role is Role.ASSISTANT for turn in episode.turns)


def test_the_whole_run_replays_equal(trained):
    folder, summary = trained
    code, out, err = run(folder, "replay", "lookup", "--json", timeout_s=120)
    assert code == 0, err
    facts = last_json(out)
    stored = sum(1 for _ in EpisodeStore(str(folder / "runs" / summary["run"])).iterate())
    assert (facts["equal"], facts["episodes"], facts["diverged"], facts["refused"]) == (True, stored, 0, 0)


def test_a_branch_goes_on_with_the_trained_policy_and_training_never_sees_it(trained):
    folder, summary = trained
    root = str(folder / "runs" / summary["run"])
    parent = next(e for e in EpisodeStore(root).iterate({"purpose": "train"}) if len(e.views) > 1)
    code, out, err = run(folder, "replay", "lookup", parent.episode_id, "--branch", "1", "--json", timeout_s=120)
    assert code == 0, err
    branch = EpisodeStore(root).find(last_json(out)["episode_id"])
    assert (branch.purpose, branch.parent_episode, branch.branch_step) == (Purpose.REPLAY, parent.episode_id, 1)
    for old, new in zip(parent.turns[:3], branch.turns[:3], strict=True):
        assert new.token_ids.tolist() == old.token_ids.tolist()
        assert new.behaviour_logprobs.tolist() == old.behaviour_logprobs.tolist()
    assert branch.episode_id not in FateTable(root).by_episode()
    code, out, err = run(folder, "replay", "lookup", branch.episode_id, timeout_s=60)
    assert code == 0, err


def test_a_suite_tells_the_model_from_the_world(trained):
    folder, _ = trained
    code, out, err = run(folder, "suite", "freeze", "lookup", "--out", "suite.msgpack", "--json", timeout_s=120)
    assert code == 0, err
    frozen = last_json(out)
    assert frozen["compared"] >= 8 and sum(frozen["endings"].values()) == frozen["episodes"]
    code, out, err = run(folder, "suite", "run", "suite.msgpack", "--run", "lookup", "--json", timeout_s=120)
    assert code == 0, err
    facts = last_json(out)
    assert (facts["world"], facts["model"], facts["pairs"]) == ("same", "same", frozen["compared"])
