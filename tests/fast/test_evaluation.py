"""What an evaluation adds up to, on numbers worked by hand."""

import json

import pytest
from evaluation_kit import evaluation, outcome, trials

from headrace.platform.evaluation.interval import Interval, bootstrap, sign_flip_p
from headrace.platform.evaluation.record import evaluation_facts, summary_line
from headrace.platform.evaluation.summary import pass_at_k, pass_hat_k, summarize
from headrace.platform.observability.names import Metric
from headrace.platform.records import FaultOwner, Status


# cases E1, E15
def test_what_has_no_valid_score_is_not_a_failure():
    broken = {"status": Status.ENV_BUG, "fault_owner": FaultOwner.ENVIRONMENT, "fault": "KeyError: 'answer'"}
    figures = summarize(
        evaluation([outcome("a"), outcome("b", 0.0), outcome("c", None, **broken), outcome("d", None)])
    ).overall
    assert (figures.episodes, figures.scored, figures.unscored, figures.tasks) == (4, 2, 2, 4)
    assert figures.success.mean == 0.5
    assert figures.errors == {"environment": 1}
    assert figures.statuses == {"ENV_BUG": 1, "OK": 3}
    assert figures.fault == "KeyError: 'answer'"


def test_nothing_measured_is_none():
    empty = summarize(evaluation([])).overall
    assert (empty.success, empty.mean_score, empty.episode_s, empty.tool_s, empty.turns) == (None,) * 5
    assert empty.pass_at == empty.pass_hat == {}
    unscored = summarize(evaluation([outcome("a", None)])).overall
    assert (unscored.success, unscored.pass_at, unscored.tool_s) == (None, {}, None)
    assert unscored.episode_s.p50_s == 1.0


def test_graded_scores_have_a_mean_and_succeed_at_one():
    scores = (0.25, 0.75, 1.0, sum([0.1] * 10))  # the last is 0.9999999999999999
    figures = summarize(evaluation([outcome(f"t{n}", score) for n, score in enumerate(scores)])).overall
    assert figures.mean_score.mean == 0.75
    assert figures.success.mean == 0.5


def test_pass_at_k_and_pass_hat_k_worked_by_hand():
    # 5 trials, 2 successes: of the 10 pairs 3 hold no success and 1 holds two.
    assert pass_at_k(5, 2, 2) == pytest.approx(1 - 3 / 10)
    assert pass_hat_k(5, 2, 2) == pytest.approx(1 / 10)
    assert pass_at_k(5, 2, 4) == 1.0
    assert pass_hat_k(5, 2, 3) == 0.0
    assert pass_at_k(5, 2, 1) == pass_hat_k(5, 2, 1) == pytest.approx(0.4)
    for k in (0, 6):
        with pytest.raises(ValueError, match="1 <= k <= trials"):
            pass_at_k(5, 2, k)


def test_the_shares_of_k_weigh_tasks_alike():
    figures = summarize(
        evaluation([*trials("a", "1111"), *trials("b", "1100"), *trials("c", "00--")], samples=4)
    ).overall
    assert figures.success.mean == 0.6
    assert figures.pass_at[1] == figures.pass_hat[1] == pytest.approx((1 + 1 / 2 + 0) / 3)
    assert figures.pass_at[2] == pytest.approx((1 + (1 - 1 / 6) + 0) / 3)
    assert figures.pass_hat[2] == pytest.approx((1 + 1 / 6 + 0) / 3)
    # c has two scored trials, so it says nothing about three or four
    assert figures.pass_at[4] == 1.0
    assert figures.pass_hat[4] == 0.5


def test_other_seeds_of_a_task_are_other_trials_but_the_same_cluster():
    outcomes = [*trials("a", "11", seed=1), *trials("a", "00", seed=2)]
    figures = summarize(evaluation(outcomes, samples=2)).overall
    assert figures.pass_hat == {1: 0.5, 2: 0.5}
    assert figures.success == Interval(0.5, None, None), "one task says nothing about others"


def test_environments_are_counted_apart_also_where_task_ids_meet():
    outcomes = [outcome("a", 1.0), outcome("a", 0.0, environment="maze"), outcome("b", 0.0, environment="maze")]
    summary = summarize(evaluation(outcomes))
    assert {name: figures.success.mean for name, figures in summary.environments.items()} == {"counter": 1, "maze": 0}
    assert summary.overall.tasks == 3


def test_percentiles_worked_by_hand():
    outcomes = [outcome(f"t{n}", duration_s=float(n)) for n in range(101)]
    outcomes += [outcome("u", duration_s=50.0, tool_s=0.5), outcome("v", duration_s=50.0, tool_s=1.5)]
    figures = summarize(evaluation(outcomes)).overall
    assert (figures.episode_s.p50_s, figures.tool_s.p50_s) == (50, 1.0)
    assert figures.episode_s.p99_s == pytest.approx(98.98)
    assert figures.tool_s.p99_s == pytest.approx(0.5 + 0.99)


def test_bootstrap_is_seeded_and_covers_the_mean():
    values = [[1.0]] * 30 + [[0.0]] * 70
    first = bootstrap(values, seed=3)
    assert first == bootstrap(values, seed=3)
    assert first.mean == 0.3
    # a normal interval would be 0.3 ± 1.96·sqrt(0.3·0.7/100) = 0.21 … 0.39
    assert first.low == pytest.approx(0.21, abs=0.02)
    assert first.high == pytest.approx(0.39, abs=0.02)
    assert str(Interval(0.3, 0.21, 0.39)) == "0.300 [0.210, 0.390]"


def test_bootstrap_resamples_tasks_not_episodes():
    alone = bootstrap([[1.0]] * 40 + [[0.0]] * 40, seed=0)
    bound = bootstrap([[1.0] * 8] * 5 + [[0.0] * 8] * 5, seed=0)
    assert bound.mean == alone.mean
    assert bound.high - bound.low > 2 * (alone.high - alone.low)
    with pytest.raises(ValueError, match="at least one value"):
        bootstrap([[]], seed=0)


def test_sign_flips_worked_by_hand():
    # Sums 1, 1, 2: of the 8 signs only +++ and --- reach the observed 4.
    assert sign_flip_p([[1.0], [0.5, 0.5], [2.0]], seed=0) == 2 / 8
    # 3 - 1 = 2: every one of the 4 signs gives 2 or 4.
    assert sign_flip_p([[3.0], [-1.0]], seed=0) == 1.0
    assert sign_flip_p([[0.0], [1.0, -1.0]], seed=0) == 1.0
    assert sign_flip_p([[0.1 + 0.2], [-0.3]], seed=0) == 1.0, "rounding is no difference"


def test_many_tasks_are_drawn_and_agree_with_the_exact_value():
    drawn = sign_flip_p([[1.0]] * 12 + [[-1.0]] * 4, seed=1)
    # |S| >= 8 of 16 coins: 2 (C(16,0)+C(16,1)+C(16,2)+C(16,3)+C(16,4)) / 2^16 = 2·2517/65536
    assert drawn == pytest.approx(2 * 2517 / 65536, abs=0.008)
    assert drawn == sign_flip_p([[1.0]] * 12 + [[-1.0]] * 4, seed=1)
    assert sign_flip_p([[1.0]] * 40, seed=0) == 1 / 10_001


def test_the_record_does_not_depend_on_who_played_first():
    outcomes = [*trials("b", "10"), *trials("a", "01", environment="maze"), *trials("a", "11")]
    assert evaluation(outcomes) == evaluation(outcomes[::-1])
    assert [each.task_id for each in evaluation(outcomes).outcomes] == ["a", "a", "b", "b", "a", "a"]


def test_the_line_for_metrics_has_only_what_was_measured():
    made = evaluation([*trials("a", "11"), *trials("b", "1-"), outcome("c", 0.5, environment="maze")], samples=2)
    line = summary_line(made)
    assert line[Metric.EVAL_SUCCESS] == pytest.approx(3 / 4)
    assert line[Metric.EVAL_SCORE] == pytest.approx(3.5 / 4)
    assert line[Metric.EVAL_LOW] <= line[Metric.EVAL_SCORE] <= line[Metric.EVAL_HIGH]
    assert line[Metric.EVAL_UNSCORED] == 1
    assert line[Metric.EVAL_PASS_HAT] == {"1": pytest.approx(2 / 3), "2": 1.0}
    assert line[Metric.EVAL_BY_ENVIRONMENT] == {"counter": 1.0, "maze": 0.5}
    nothing = summary_line(evaluation([outcome("a", None)]))
    assert nothing == {Metric.EVAL_UNSCORED: 1, Metric.EVAL_PASS_HAT: {}, Metric.EVAL_BY_ENVIRONMENT: {}}


def test_the_facts_are_json_and_null_where_not_measured():
    made = evaluation([outcome("a", None)])
    facts = json.loads(json.dumps(evaluation_facts(made, summarize(made)), allow_nan=False))
    assert facts["success"] is None and facts["success_interval"] is None and facts["tool_s"] is None
    assert facts["episode_s"] == {"p50_s": 1.0, "p99_s": 1.0}
    assert facts["environments"]["counter"]["unscored"] == 1
    assert (facts["name"], facts["version"]) == ("v000003-dev-01", 3)
