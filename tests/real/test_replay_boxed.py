"""`headrace replay` and `--branch` of a run whose world is in boxes: its files are made again up to the step."""

import json

import pytest
from command_line import call_main, last_json

from headrace.platform.records.status import Purpose, Status, StopReason
from headrace.platform.store.episodes import EpisodeStore

pytestmark = pytest.mark.timeout(240)
SMALL = ("model.tiny_llama=null", "sft=null", "runtime.kind=inprocess", "learner.steps=1", "learner.batch_groups=2")
BOXES = {"bubblewrap": {"mode": "bubblewrap"}, "docker": {"mode": "docker", "image": "headrace-test"}}
# Of a user's own file, so that it is built in a thread, and slowly: a branch and a replay build one, too.
MINE = """
import time
from headrace.actors.environments.lookup import LookupTasks, SandboxedLookup


class Mine(SandboxedLookup):
    def __init__(self):
        super().__init__()
        time.sleep(0.02)

    @staticmethod
    def tasks(split, seed):
        return LookupTasks(split, seed, [2])
"""


@pytest.fixture(scope="module", params=BOXES)
def folder(request, docker_daemon, lookup_model, tmp_path_factory):
    """Where a run was made each slot of which loses a box at step 2 of its first attempt."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "mine.py").write_text(MINE)
    world = {
        "name": "./mine.py:Mine",
        "alias": "lookup",
        "sandbox": BOXES[request.param],
        "faults": [{"kind": "kill_sandbox", "steps": [2]}],
        "budgets": {"max_turns": 4, "max_tokens": 128, "max_seconds": 60},
        "sampling": {"max_new_tokens": 16},
    }
    given = (f"model.path={lookup_model}", f"environments={json.dumps([world])}", "eval.tasks=8", *SMALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("DOCKER_HOST", docker_daemon.url)
        assert call_main(patch, "train", "lookup", *given) == 0
    return folder


@pytest.fixture
def replay(folder, docker_daemon, monkeypatch, capsys):
    """`headrace replay lookup ARGS`: its exit code, facts and errors."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("DOCKER_HOST", docker_daemon.url)

    def replay(*args):
        code = call_main(monkeypatch, "replay", "lookup", *args, "--json")
        out, err = capsys.readouterr()
        return code, last_json(out) if out.strip() else {}, err

    return replay


@pytest.fixture
def store(folder):
    (root,) = (folder / "runs").iterdir()
    return EpisodeStore(str(root))


def test_episodes_replay_equal_and_killed_boxes_are_taken_from_the_record(replay, store):
    episodes = list(store.iterate({"purpose": "train"}))
    killed = [each.episode_id for each in episodes if each.injected_faults][:8]
    others = [each.episode_id for each in episodes if not each.injected_faults][:8]
    code, facts, err = replay(*killed, *others)
    assert (code, facts["equal"], facts["episodes"], facts["refused"]) == (0, True, 16, 0), err
    assert facts["from_record"] == 8


def test_a_branch_goes_on_in_a_box_of_its_own(replay, store):
    parent = next(e for e in store.iterate({"purpose": "train"}) if len(e.views) > 2 and e.status is Status.OK)
    for step in (0, 1, 2):
        code, facts, err = replay(parent.episode_id, "--branch", str(step))
        assert code == 0, err
        branch = store.find(facts["episode_id"])
        assert (branch.purpose, branch.parent_episode, branch.branch_step) == (Purpose.REPLAY, parent.episode_id, step)
        assert branch.sandbox_id and branch.sandbox_id != parent.sandbox_id
        assert (branch.fault, branch.image_digest) == ("", parent.image_digest)
        kept = 2 * step + 1
        old, new = parent.turns[:kept], branch.turns[:kept]
        assert [(each.token_ids.tolist(), each.state_hash) for each in new[:-1]] == [
            (each.token_ids.tolist(), each.state_hash) for each in old[:-1]
        ]
        assert new[-1].token_ids.tolist() == old[-1].token_ids.tolist()
        code, facts, err = replay(branch.episode_id)
        assert (code, facts["equal"]) == (0, True), err


def test_a_branch_before_a_killed_box_meets_no_kill(replay, store):
    struck = next(e for e in store.iterate({"purpose": "train"}) if e.injected_faults)
    assert struck.stop_reason is StopReason.FAULT
    code, facts, err = replay(struck.episode_id, "--branch", "1")
    assert code == 0, err
    branch = store.find(facts["episode_id"])
    assert (branch.injected_faults, branch.fault) == ((), "")
    code, _, err = replay(struck.episode_id, "--branch", "2")
    assert code == 2 and "can go on from step 0 (its reset) to 1" in err
