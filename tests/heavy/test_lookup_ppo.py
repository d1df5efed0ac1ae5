"""PPO with turn-level GAE and a critic learns the tool task through the real command line."""

import pytest
from command_line import last_json, run

pytestmark = pytest.mark.timeout(600)


def test_it_surpasses_its_demonstrator(tmp_path):
    overrides = ("learner.algorithm.name=ppo", "runtime.kind=inprocess")
    code, out, err = run(tmp_path, "train", "lookup", *overrides, "--json", timeout_s=580)
    assert code == 0, err[-3000:]
    summary = last_json(out)
    assert summary["success_before"] <= 0.45, "the imitation of a demonstrator that guesses"
    assert summary["success_after"] >= 0.90
    assert summary["equation_holds"] and summary["fates"]["in_flight"] == 0
