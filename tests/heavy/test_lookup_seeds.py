"""The main job through the real command line: an agent learns to use a tool, asynchronously, on every seed."""

import pytest
from command_line import last_json, run

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_surpasses_its_demonstrator(seed, tmp_path):
    code, out, err = run(tmp_path, "train", "lookup", f"seed={seed}", "--json", timeout_s=580)
    assert code == 0, err[-3000:]
    summary = last_json(out)
    assert summary["success_before"] <= 0.45, "the imitation of a demonstrator that guesses"
    assert summary["success_after"] >= 0.90
    assert summary["lag_max_trained"] <= 4
    assert summary["lag_share_ge1"] >= 0.3, "episodes are played while the learner trains"
    assert summary["overlap"] >= 0.5
    assert summary["equation_holds"] and summary["fates"]["in_flight"] == 0
