"""How many environment steps a run executed, what it had learned by then, and what a run that branches cannot have."""

import msgspec
import pytest
from run_kit import small_config

from headrace.deploy.branch_checks import check_branch
from headrace.deploy.credit_curves import CurvePoint, credit_curve, score_at, steps_to
from headrace.platform.config.branch import BranchConfig
from headrace.platform.errors import ConfigError
from headrace.platform.observability.metrics import MetricsFile
from headrace.platform.observability.names import Metric
from headrace.platform.records import AttemptId, Role
from headrace.platform.records.codec import episode_codec
from headrace.platform.records.status import Purpose
from headrace.platform.store.episodes import EpisodeStore
from headrace.platform.store.run_root import RunRoot
from headrace.platform.testing.episodes import make_episode, plain_turn, policy_turn


def episode_of(sample, turns, version, purpose=Purpose.TRAIN, **fields):
    pairs = [(plain_turn(Role.USER), policy_turn(version=version)) for _ in range(turns)]
    attempt_id = AttemptId("a-run", version, sample, 0, purpose)
    return make_episode([turn for pair in pairs for turn in pair], version=version, attempt_id=attempt_id, **fields)


def test_steps_that_are_done_again_are_counted_apart(tmp_path):
    """Version 0 plays a trunk of 4 turns and a continuation from step 2 with 1 turn of its own, version 1 another 5."""
    root = RunRoot.create(str(tmp_path), "a-run", "name: a")
    trunk = episode_of(0, 4, 0)
    played = [
        trunk,
        episode_of(1, 3, 0, parent_episode=trunk.episode_id, branch_step=2),
        episode_of(0, 5, 1),
        episode_of(0, 7, 0, Purpose.EVAL),
    ]
    EpisodeStore(root.url).write([(each, episode_codec.encode(each)) for each in played], "a-worker")
    metrics = MetricsFile(root.metrics, lambda: 0.0)
    for version, score in ((0, 0.25), (1, 0.5), (2, 1.0), (2, 0.0)):
        metrics.append({Metric.EVAL_VERSION: version, Metric.EVAL_SCORE: score})
    assert credit_curve(root) == [CurvePoint(0, 0, 0, 0.25), CurvePoint(1, 5, 2, 0.5), CurvePoint(2, 10, 2, 1.0)]


def test_curves_are_straight_between_evaluations():
    curve = [CurvePoint(0, 0, 0, 0.2), CurvePoint(2, 100, 10, 0.6), CurvePoint(4, 200, 20, 0.4)]
    assert [round(score_at(curve, steps), 6) for steps in (0, 50, 100, 150, 200, 300)] == [0.2, 0.4, 0.6, 0.5, 0.4, 0.4]
    assert (steps_to(curve, 0.1), steps_to(curve, 0.5), steps_to(curve, 0.9)) == (0.0, pytest.approx(75.0), None)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("rollout.update_mode=turn", "set rollout.update_mode=sticky"),
        ("environments.0.faults=[{kind: server_error, rate: 0.1}]", "leave the faults out"),
    ],
)
def test_what_cannot_branch_is_refused(change, told, tmp_path):
    config = small_config(tmp_path, tmp_path, change)
    check_branch(config)
    learner = config.learner.model_copy(update={"algorithm": BranchConfig()})
    with pytest.raises(ConfigError, match=told):
        check_branch(config.model_copy(update={"learner": learner}))
    plain = small_config(tmp_path, tmp_path)
    check_branch(plain.model_copy(update={"learner": learner}))


def test_an_agent_of_ones_own_cannot_branch(tmp_path):
    config = small_config(tmp_path, tmp_path)
    harness = config.environments[0].model_copy(update={"name": "harness"})
    learner = config.learner.model_copy(update={"algorithm": BranchConfig()})
    with pytest.raises(ConfigError, match="cannot; choose another algorithm"):
        check_branch(config.model_copy(update={"learner": learner, "environments": (harness,)}))


def test_an_inherited_turn_was_executed_by_the_trunk():
    trunk = episode_of(0, 2, 0)
    assert msgspec.structs.replace(trunk, branch_step=1, parent_episode="x").inherited_turns == 3
