"""A scorer named in a recipe grades in a process of its own, beside the environment."""

import pytest
from run_kit import run_inprocess, small_config, stored

from headrace.platform.errors import RunFailed
from headrace.platform.records.status import Purpose
from headrace.platform.store.tables import RewardTable


@pytest.mark.timeout(120)
def test_its_components_are_added_to_those_of_the_world(lookup_model, tmp_path):  # case E3
    config = small_config(
        lookup_model, tmp_path, "learner.steps=1", "eval.tasks=4", "environments.lookup.scorer={kind: exact}"
    )
    _, root = run_inprocess(config)
    rewards = RewardTable(root.url).by_episode()
    played = [episode for episode in stored(root) if episode.purpose is Purpose.TRAIN]
    graded = {episode.episode_id: rewards[episode.episode_id] for episode in played}
    assert all(sum(row.grader_version.startswith("exact-") for row in rows) == 1 for rows in graded.values())
    for rows in graded.values():
        world, scorer = ([row.value for row in rows if bool(row.grader_version) is by] for by in (False, True))
        assert world == scorer, "lookup and an exact match agree on what is right"


@pytest.mark.timeout(120)
def test_a_scorer_that_always_fails_is_no_reward(lookup_model, tmp_path):  # case E1
    (tmp_path / "broken_scorer.py").write_text(
        "class Broken:\n"
        "    version = '1'\n"
        "    def score(self, task, episode):\n"
        "        raise ZeroDivisionError('in the grader')\n"
        "    def score_group(self, task, episodes):\n"
        "        raise ZeroDivisionError('in the grader')\n"
    )
    config = small_config(
        lookup_model, tmp_path / "runs", "eval.tasks=4", "environments.lookup.scorer={kind: 'broken_scorer:Broken'}"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        with pytest.raises(RunFailed, match="valid reward"):
            run_inprocess(config)
