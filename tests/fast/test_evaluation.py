import pytest

from headrace.platform.evaluation.summary import bootstrap, summarize
from headrace.platform.records import (
    FaultOwner,
    RewardKind,
    RewardRow,
    Role,
    Status,
    StopReason,
    Task,
    ToolCallRecord,
)
from headrace.platform.testing.episodes import make_episode, plain_turn, policy_turn


def reward(episode, value, kind=RewardKind.OUTCOME):
    return RewardRow(episode_id=episode.episode_id, kind=kind, value=value, valid=value is not None)


def played(group, task, **fields):
    return make_episode(group=group, task=Task(task, "counter"), **fields)


def summary(pairs):
    """The summary of (episode, values of its outcome rewards)."""
    rewards = {e.episode_id: [reward(e, value) for value in values] for e, values in pairs}
    return summarize([episode for episode, _ in pairs], rewards, seed=0)


# cases E1, E15
def test_what_has_no_valid_reward_is_not_a_failure():
    broken = {"status": Status.ENV_BUG, "fault_owner": FaultOwner.ENVIRONMENT}
    broken |= {"terminated": False, "stop_reason": StopReason.FAULT}
    result = summary(
        [
            (played(0, "a"), [1.0]),
            (played(1, "b"), [0.0]),  # a true 0
            (played(2, "c"), [None]),  # the grader raised
            (played(3, "d"), []),  # never graded
            (played(4, "e", **broken), [0.0]),  # a reward beside an environment's fault is no reward
            (played(5, "f"), [1.0, None]),
        ]
    )
    assert (result.episodes, result.scored, result.unscored) == (6, 2, 4)
    assert result.success.mean == 0.5
    assert result.errors == {"environment": 1}
    assert result.statuses == {"ENV_BUG": 1, "OK": 5}


def test_nothing_measured_is_none():
    empty = summary([])
    assert (empty.success, empty.pass_at_1, empty.episode_s, empty.tool_s) == (None, None, None, None)


def test_pass_at_1_weighs_tasks_alike():
    pairs = [(played(n, "easy"), [1.0]) for n in range(3)] + [(played(3, "hard"), [0.0])]
    result = summary(pairs)
    assert result.success.mean == 0.75
    assert result.pass_at_1 == 0.5


def test_other_components_are_no_success():
    episode = played(0, "a")
    rewards = {episode.episode_id: [reward(episode, 0.5), reward(episode, 1.0, RewardKind.FORMAT)]}
    assert summarize([episode], rewards, seed=0).success.mean == 0


def test_percentiles_worked_by_hand():
    def with_tool(seconds):
        return ToolCallRecord(index=0, call_id="", name="get", start_s=1.0, end_s=1.0 + seconds)

    turns = (plain_turn(Role.USER), policy_turn(tool_calls=(with_tool(0.5), with_tool(1.5))))
    episodes = [(played(n, "a", duration_s=float(n), turns=turns), [1.0]) for n in range(101)]
    result = summary(episodes)
    assert (result.episode_s.p50_s, result.episode_s.p99_s) == (50, 99)
    assert (result.tool_s.p50_s, result.tool_s.p99_s) == (1.0, 1.5)


def test_bootstrap_is_seeded_and_covers_the_mean():
    values = [[1.0]] * 30 + [[0.0]] * 70
    first = bootstrap(values, seed=3)
    assert first == bootstrap(values, seed=3)
    assert first.mean == 0.3
    # a normal interval would be 0.3 ± 1.96·sqrt(0.3·0.7/100) = 0.21 … 0.39
    assert first.low == pytest.approx(0.21, abs=0.02)
    assert first.high == pytest.approx(0.39, abs=0.02)


def test_bootstrap_resamples_tasks_not_episodes():
    alone = bootstrap([[1.0]] * 40 + [[0.0]] * 40, seed=0)
    bound = bootstrap([[1.0] * 8] * 5 + [[0.0] * 8] * 5, seed=0)
    assert bound.mean == alone.mean
    assert bound.high - bound.low > 2 * (alone.high - alone.low)
    assert bootstrap([[1.0, 1.0]], seed=0) == bootstrap([[1.0]] * 9, seed=1)
    with pytest.raises(ValueError, match="at least one value"):
        bootstrap([[]], seed=0)
