"""Studies: curves, goals, and that what is done is not done again."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from headrace.deploy import study as studies
from headrace.deploy.cli.options import recipes_dir
from headrace.deploy.study import CREDIT, Point, StudiedRun, Study, goal_reached, read_curve, run_study
from headrace.platform.config.load import load_recipe
from headrace.platform.errors import ConfigError, RunFailed
from headrace.platform.observability.study_figure import on_one_axis, smoothed

START = ["sft=null", "model.path=somewhere", "model.tiny_llama=null"]


def curve(*successes: float) -> tuple[Point, ...]:
    return tuple(Point(n + 1, 2.0 * n, each) for n, each in enumerate(successes))


def test_the_goal_is_reached_by_the_mean_of_three_steps():
    assert goal_reached(curve(0.95, 0.95)) is None
    assert goal_reached(curve(0.2, 1.0, 1.0, 0.7, 1.0)) == Point(4, 6.0, 0.7)
    assert goal_reached(curve(0.2, 1.0, 0.8, 0.8)) is None


def test_seconds_count_from_the_beginning_of_the_first_step(tmp_path):
    rows = [
        {"time_s": 100.0, "stage": "sft format", "sft_loss": 1.0},
        {"time_s": 110.0, "loss": 0.1, "learner_step": 1, "learner_busy_s": 2.0, "learner_wait_s": 3.0, "success": 0.5},
        {"time_s": 112.0, "loss": 0.1, "learner_step": 2, "learner_busy_s": 1.0, "learner_wait_s": 0.0, "success": 0.6},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_curve(str(tmp_path / "metrics.jsonl")) == (Point(1, 5.0, 0.5), Point(2, 7.0, 0.6))


def test_seeds_meet_on_one_axis():
    """Where all of them have points; smoothed over three, fewer at the beginning."""
    assert smoothed([(1, 0.0, 0.0), (2, 1.0, 1.0), (3, 2.0, 0.5), (4, 3.0, 0.3)]).tolist() == [0.0, 0.5, 0.5, 0.6]
    x, table = on_one_axis([[(1, 0.0, 0.0), (3, 9.0, 1.0)], [(2, 5.0, 0.4), (9, 9.0, 0.4)]], 0)
    assert (x[0], x[-1]) == (2.0, 3.0)
    assert table[:, 0].tolist() == [0.25, 0.4]
    assert np.isclose(table[0, -1], 0.5)


def test_every_condition_of_the_command_is_a_recipe():
    for conditions, recipe in ((CREDIT, "lookup"), (studies.LAGS, "lookup-slow")):
        for overrides in conditions.values():
            load_recipe(recipe, list(overrides), recipes_dir())


@pytest.fixture
def trained(monkeypatch):
    """As if `headrace train` had run: what it was told, in order."""
    told = []

    def run(recipe, changes, condition, seed):
        told.append((condition, seed, list(changes)))
        return StudiedRun(
            condition=condition,
            seed=seed,
            root="somewhere",
            before=0.3,
            after=0.9,
            curve=curve(0.5, 0.9, 0.9, 0.9),
            steps_to_goal=4,
            seconds_to_goal=6.0,
        )

    monkeypatch.setattr(studies, "_run", run)
    monkeypatch.setattr(studies, "prepare_base_model", lambda config, say: pytest.fail("the start is given"))
    return told


def play(out: Path, seeds: int, **conditions: str) -> Study:
    given = {name: (override,) for name, override in conditions.items()}
    return run_study("s", "lookup", recipes_dir(), given, seeds=range(seeds), changes=START, out=out)


def test_what_is_done_is_not_done_again(tmp_path, trained):
    conditions = {"grpo": "learner.algorithm.name=grpo", "rloo": "learner.algorithm.name=rloo"}
    play(tmp_path, 1, **conditions)
    done = play(tmp_path, 2, **conditions)
    assert [(condition, seed) for condition, seed, _ in trained] == [("grpo", 0), ("rloo", 0), ("grpo", 1), ("rloo", 1)]
    assert "learner.algorithm.name=rloo" in trained[1][2] and "seed=1" in trained[2][2]
    assert msgspec.json.decode((tmp_path / "s.json").read_bytes(), type=Study) == done
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")


def test_another_study_is_not_mixed_in(tmp_path, trained):
    play(tmp_path, 1, grpo="learner.lr=1e-3")
    with pytest.raises(ConfigError, match=r"another study.*grpo differs.*--out"):
        play(tmp_path, 1, grpo="learner.lr=2e-3")


@pytest.mark.parametrize("told", ["seed=7", "learner.algorithm.name=rloo", "runs_dir=elsewhere"])
def test_what_the_study_sets_itself_is_refused(tmp_path, trained, told):
    with pytest.raises(ConfigError, match=r"the study itself sets .*leave that out"):
        given = {"grpo": ("learner.algorithm.name=grpo",)}
        run_study("s", "lookup", recipes_dir(), given, seeds=[0], changes=[*START, told], out=tmp_path)
    assert trained == []


def test_a_condition_that_is_wrong_is_refused_before_any_run(tmp_path, trained):
    with pytest.raises(ConfigError, match=r"learner\.algorithm\.name"):
        play(tmp_path, 1, grpo="learner.lr=1e-3", wrong="learner.algorithm.name=grop")
    assert trained == []


def test_a_run_that_fails_is_named_and_what_was_done_stays(tmp_path, trained, monkeypatch):
    run = studies._run

    def failing(recipe, changes, condition, seed):
        if seed == 1:
            raise RunFailed("grpo, seed 1: no word")
        return run(recipe, changes, condition, seed)

    monkeypatch.setattr(studies, "_run", failing)
    with pytest.raises(RunFailed, match="seed 1"):
        play(tmp_path, 3, grpo="learner.lr=1e-3")
    assert [each.seed for each in msgspec.json.decode((tmp_path / "s.json").read_bytes(), type=Study).runs] == [0]


def test_the_last_word_of_a_failed_run_is_passed_on():
    with pytest.raises(RunFailed, match=r"grpo, seed 0, exit code 2: error: .*nowhere"):
        studies._run("nowhere", [], "grpo", 0)
