"""The main job on real vLLM: full weights, one replica, which lets its episodes run out before each update (P22)."""

from pathlib import Path

import pytest
from command_line import last_json, run

from headrace.platform.store.episodes import EpisodeStore

pytestmark = pytest.mark.timeout(900)
PATIENT = "serving.start_deadline_s=600"  # vLLM starts beside the tests of the other lane


def test_it_surpasses_its_demonstrator(tmp_path: Path, lookup_model: Path) -> None:
    given = (f"model.path={lookup_model}", "model.tiny_llama=null", "sft=null")
    changes = ("serving.engine=vllm", PATIENT, "learner.steps=20", "eval.tasks=128", f"runs_dir={tmp_path / 'runs'}")
    code, out, err = run(tmp_path, "train", "lookup", *given, *changes, "--json", timeout_s=840)
    assert code == 0, err[-3000:]
    summary = last_json(out)
    assert summary["success_before"] <= 0.45 and summary["success_after"] >= 0.90
    assert summary["equation_holds"] and summary["fates"]["in_flight"] == 0
    assert summary["restarts"] == {} and summary["lag_max_trained"] <= 4
    assert summary["bubble_s"] > 0, "what an update costs that waits for its episodes"
    assert summary["gap_alarms"] == {}, "engine and learner find the same logprobs"
    episode = next(EpisodeStore(summary["root"]).iterate())
    assert all("vllm" in turn.engine_build for turn in episode.turns if turn.is_action)


def test_adapters_are_served_beside_each_other(tmp_path: Path, lookup_model: Path) -> None:
    """LoRA: sticky episodes need no drain (P22), and engine and learner find the same logprobs."""
    given = (f"model.path={lookup_model}", "model.tiny_llama=null", "sft=null", f"runs_dir={tmp_path / 'runs'}")
    lora = ("serving.engine=vllm", PATIENT, "serving.vllm.adapters=4", "serving.drain=forbidden", "learner.lora.rank=8")
    code, out, err = run(
        tmp_path, "train", "lookup", *given, *lora, "learner.steps=3", "eval.tasks=16", "--json", timeout_s=840
    )
    assert code == 0, err[-3000:]
    summary = last_json(out)
    assert summary["equation_holds"] and summary["restarts"] == {} and summary["version"] == 3
    assert summary["gap_alarms"] == {}
    sampled = {
        span.version
        for episode in EpisodeStore(summary["root"]).iterate()
        for turn in episode.turns
        for span in turn.version_spans
    }
    bases = {version.base_hash for version in sampled if version.number > 0}
    assert len(bases) == 1 and "" not in bases
