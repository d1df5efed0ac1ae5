"""A stock OpenEnv server's environment trains: a tiny Llama learns to say what is shown."""

import json
import random

import pytest
from command_line import last_json, run
from openenv_server import LETTERS, serving

pytestmark = pytest.mark.timeout(600)

RECIPE = """\
name: echo
environments:
  - name: openenv
    args: {observation_field: word}
    pool: {hosts: [%s], protocol: openenv}
    budgets: {max_turns: 1, max_tokens: 32}
    sampling: {temperature: 1.0, max_new_tokens: 8}
model:
  tiny_llama: {vocabulary: bytes, hidden: 64, heads: 2, layers: 2, intermediate: 192, max_positions: 32}
sft:
  stages:
    - {name: chats, data: ./chats.jsonl, max_steps: 150, lr: 3.0e-3}
queue: {max_lag: 2}
learner:
  algorithm: {name: grpo, group_size: 8}
  lr: 1.0e-3
  batch_groups: 16
  oversample_max: 2
  steps: 30
eval: {tasks: 128}
"""


def chats(count):
    """Whoever speaks here says half of the letters at random."""
    dice = random.Random(0)
    for _ in range(count):
        word = "".join(dice.choice(LETTERS) for _ in range(dice.randint(1, 4)))
        answer = "".join(dice.choice((letter, dice.choice(LETTERS))) for letter in word)
        said = [{"role": "user", "content": word}, {"role": "assistant", "content": answer}]
        yield json.dumps({"messages": said})


def test_it_trains(tmp_path):
    (tmp_path / "chats.jsonl").write_text("\n".join(chats(300)) + "\n")
    with serving(tmp_path, capacity=64) as address:
        (tmp_path / "echo.yaml").write_text(RECIPE % address)
        code, out, err = run(tmp_path, "train", "./echo.yaml", "--json", timeout_s=580)
    assert code == 0, err[-3000:]
    summary = last_json(out)
    assert summary["score_before"] <= 0.75
    assert summary["score_after"] >= 0.85
    assert summary["equation_holds"] and summary["fates"]["failed"] <= summary["fates"]["dispatched"] // 20
