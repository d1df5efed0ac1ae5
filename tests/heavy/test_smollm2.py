"""A real pretrained model through the normal path: its weights, its tokenizer, Ray, queue, learner, versions."""

from pathlib import Path

import pytest
import torch
from command_line import last_json, run
from transformers import AutoModelForCausalLM

from headrace.platform.records.status import Purpose
from headrace.platform.store.episodes import EpisodeStore

pytestmark = pytest.mark.timeout(900)


def test_a_real_model_plays_and_learns(tmp_path):
    code, out, err = run(tmp_path, "train", "smollm2", "--json", timeout_s=880)
    assert code == 0, err[-3000:]
    summary = last_json(out)
    assert (summary["learner_steps"], summary["version"]) == (2, 2)
    assert summary["equation_holds"]
    assert summary["fates"]["in_flight"] == summary["fates"]["failed"] == 0
    assert summary["fates"]["trained"] == 4

    root = Path(summary["root"])
    episodes = [each for each in EpisodeStore(str(root)).iterate() if each.purpose is Purpose.TRAIN]
    assert len(episodes) >= 4
    played = [[int(turn.action_mask.sum()) for turn in each.turns if turn.is_action] for each in episodes]
    assert all(1 <= tokens <= 32 for turns in played for tokens in turns)
    assert sum(len(turns) == 2 for turns in played) >= 4, "an episode ends earlier only when the number is found"

    (folder,) = (root / "versions").glob("f*-v000002")
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        logits = model(torch.arange(5, 13)[None]).logits
    assert (model.num_parameters() > 130e6, logits.shape[-1], bool(logits.isfinite().all())) == (True, 49152, True)
