"""A whole run around somebody's own code that fails: told with file and line, and ended by the breaker alone (E8)."""

import json
from pathlib import Path

import pytest
from run_kit import RECIPES, run_inprocess, stored

from headrace.platform.config.load import load_recipe
from headrace.platform.errors import RunFailed
from headrace.platform.records.status import FaultOwner, Purpose
from headrace.platform.store.tables import RewardTable

REWARD = """
import headrace

ROWS = [{"prompt": f"find k{i:02d}", "number": i} for i in range(32)]


def reward(completion: str, number: int) -> float:
    if SOMETIMES and number % 4 == 3 or not SOMETIMES:
        raise KeyError("gold")
    return float(len(completion))


Own = headrace.SingleTurn(ROWS, reward=reward)
"""
GENERATOR = """
import headrace


def rows(seed: int) -> dict:
    if seed % 4 == 3:
        return {"prompt": 1 / (seed % 4 - 3)}
    return {"prompt": f"find k{seed % 32:02d}"}


Own = headrace.SingleTurn(rows, reward=lambda completion: float(len(completion)))
"""
WORLD = """
import headrace
from headrace import Message, Observation, Role, StepResult


class Own(headrace.ReplayedEnvironment):
    name, version = "own", "1"

    @staticmethod
    def tasks(split, seed):
        numbers = {"train": range(0, 64), "dev": range(64, 80), "hidden": range(80, 96)}[split]
        return [{"number": number} for number in numbers]

    def tools(self):
        return []

    def _reset(self, task, seed):
        self._number = task.data["number"]
        return Observation((Message(Role.USER, "find k01"),), headrace.hash_value(self._number))

    def _step(self, message):
        if self._number % 4 == 3:
            return {}["wall"]
        outcome = headrace.RewardComponent(headrace.RewardKind.OUTCOME, float(len(message.content)))
        return StepResult(rewards=(outcome,), terminated=True, state_hash=headrace.hash_value(message.content))
"""


def run_around(source: str, model: Path, folder: Path):
    folder.mkdir(exist_ok=True)
    (folder / "own.py").write_text(source)
    changes = (
        f"model.path={model}",
        f"runs_dir={folder / 'runs'}",
        "runtime.kind=inprocess",
        "environments.Own.budgets={max_turns: 1, max_tokens: 64}",
        "learner={steps: 3, batch_groups: 4, algorithm: {group_size: 4}, batch_deadline_s: 60}",
        "eval.tasks=4",
    )
    return run_inprocess(load_recipe(f"{folder / 'own.py'}:Own", changes, RECIPES))


@pytest.mark.parametrize(
    ("source", "told"),
    [
        pytest.param("SOMETIMES = True\n" + REWARD, "own.py:10 in reward: KeyError: 'gold'", id="reward"),
        pytest.param(WORLD, "own.py:23 in _step: KeyError: 'wall'", id="environment"),
        pytest.param(GENERATOR, "own.py:7 in rows: ZeroDivisionError", id="data"),
    ],
)
def test_some_failures_cost_their_own_episodes(source, told, lookup_model, tmp_path):
    summary, root = run_around(source, lookup_model, tmp_path)
    assert summary["learner_steps"] == 3
    assert summary["equation_holds"]
    failed = [e for e in stored(root) if e.purpose is Purpose.TRAIN and e.fault_owner is not FaultOwner.NONE]
    evidence = [row.evidence for rows in RewardTable(root.url).by_episode().values() for row in rows if not row.valid]
    said = [*(episode.fault for episode in failed), *evidence]
    assert said, "nothing failed: the test shows nothing"
    assert all(told in each for each in said), said
    assert summary["fates"].get("failed:environment", 0) > 0


def test_a_run_in_which_everything_fails_says_where(lookup_model, tmp_path):
    with pytest.raises(RunFailed, match=r"own\.py:10 in reward: KeyError: 'gold'"):
        run_around("SOMETIMES = False\n" + REWARD, lookup_model, tmp_path)
    (folder,) = (tmp_path / "runs").iterdir()
    assert "own.py:10" in json.loads((folder / "summary.json").read_text())["failed"]
