"""The main job with a learner of two ranks, whose gradients and optimizer are shared."""

from pathlib import Path

import pytest
from command_line import last_json, run

pytestmark = pytest.mark.timeout(900)


def test_two_ranks_surpass_their_demonstrator(tmp_path: Path, lookup_model: Path) -> None:
    given = (f"model.path={lookup_model}", "model.tiny_llama=null", "sft=null")
    changes = ("learner.backend=deepspeed", "learner.ranks=2", "learner.steps=25", "eval.tasks=256")
    code, out, err = run(
        tmp_path, "train", "lookup", *given, *changes, f"runs_dir={tmp_path / 'runs'}", "--json", timeout_s=840
    )
    assert code == 0, err[-3000:]
    summary = last_json(out)
    assert summary["success_before"] <= 0.45 and summary["success_after"] >= 0.90
    assert summary["equation_holds"] and summary["fates"]["in_flight"] == 0
    assert summary["restarts"] == {} and summary["gap_alarms"] == {}
