"""`headrace eval` and `headrace compare` as processes: on a run that was trained through Ray, and interrupted."""

import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor

import pytest
from command_line import environment, last_json, run, start

from headrace.platform.records.status import Purpose
from headrace.platform.store.episodes import EpisodeStore
from headrace.platform.store.evaluations import EvaluationStore

pytestmark = pytest.mark.timeout(300)
SMALL = ("model.tiny_llama=null", "sft=null", "learner.steps=12", "eval.tasks=16", "runs_dir=runs")
ENDS_WITHIN_S = 30


@pytest.fixture(scope="module")
def trained(lookup_model, tmp_path_factory):
    """The folder in which a run was made by the command line, and its summary."""
    folder = tmp_path_factory.mktemp("work")
    with tempfile.TemporaryDirectory(prefix="hr-", dir="/tmp") as ray_folder:
        code, out, err = run(
            folder,
            *("train", "lookup", f"model.path={lookup_model}", *SMALL, "--json"),
            timeout_s=200,
            env=environment(RAY_TMPDIR=ray_folder),
        )
    assert code == 0, err
    return folder, last_json(out)


def answer(folder, *args) -> dict:
    code, out, err = run(folder, *args, "--json", timeout_s=120)
    assert code == 0, err
    return last_json(out)


def test_training_shows_in_a_comparison_of_first_and_last_version(trained):
    folder, summary = trained
    asked = ("--tasks", "96", "--samples", "2")
    first = answer(folder, "eval", "lookup", "--version", "0", *asked)
    last = answer(folder, "eval", "lookup", *asked, "--against", f"{summary['run']}@{first['name']}")
    assert (first["version"], last["version"]) == (0, summary["version"])
    assert last["success"] > first["success"] + 0.1
    overall = last["comparison"]["overall"]
    assert overall["pairs"] == 192 and overall["p_value"] < 0.05 and overall["score"]["low"] > 0
    assert f"@{last['name']} is better" in last["comparison"]["verdict"]
    assert answer(folder, "compare", f"lookup@{first['name']}", "lookup") == last["comparison"]


def test_what_was_evaluated_can_be_inspected_and_replayed(trained):
    folder, summary = trained
    made = answer(folder, "eval", "lookup", "--split", "hidden", "--tasks", "3")
    root = str(folder / "runs" / summary["run"])
    (chosen, *others) = EvaluationStore(root).read(made["name"]).outcomes
    assert len(others) == 2
    seen = answer(folder, "inspect", "lookup", chosen.episode_id)
    assert seen["purpose"] == "eval" and "find" in "".join(token["text"] for token in seen["turns"][0]["tokens"])
    assert answer(folder, "replay", "lookup", chosen.episode_id)["equal"]


def test_two_at_once_share_nothing(trained):
    folder, summary = trained
    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(lambda seed: answer(folder, "eval", "lookup", "--tasks", "8", "--seed", seed), ("3", "4"))
    assert one["name"] != two["name"]
    store = EvaluationStore(str(folder / "runs" / summary["run"]))
    ids = [each.episode_id for made in (one, two) for each in store.read(made["name"]).outcomes]
    assert len(set(ids)) == 16
    episodes = EpisodeStore(str(folder / "runs" / summary["run"])).iterate({"purpose": Purpose.EVAL.value})
    assert set(ids) <= {episode.episode_id for episode in episodes}


def test_ctrl_c_leaves_no_half_evaluation(lookup_model, tmp_path):
    process = start(tmp_path, "eval", str(lookup_model), "--recipe", "lookup-slow", "--tasks", "300")
    try:
        assert process.stderr.readline().startswith("300 tasks of the dev split"), "it has begun to play"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=ENDS_WITHIN_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode == 130, err
    assert err.rstrip().endswith("interrupted") and "Traceback" not in err
    assert list((tmp_path / "runs").iterdir()) == []
