"""Two evaluations of the same tasks and seeds, on numbers worked by hand."""

import pytest
from evaluation_kit import evaluation, outcome, trials

from headrace.platform.errors import ConfigError
from headrace.platform.evaluation.comparison import compare


def two(a, b, **fields):
    return evaluation(a, run="one", **fields), evaluation(b, run="two", **fields)


def scores(*values, **fields):
    return [outcome(f"t{n}", value, **fields) for n, value in enumerate(values)]


def test_pairs_are_counted_and_subtracted():
    result = compare(*two(scores(0.0, 0.5, 1.0, 1.0, 0.0), scores(1.0, 1.0, 0.5, 1.0, 1.0)))
    overall = result.overall
    assert (overall.pairs, overall.tasks, overall.wins, overall.losses, overall.ties) == (5, 5, 3, 1, 1)
    assert (overall.score_a, overall.score_b) == (0.5, 0.9)
    assert overall.score.mean == pytest.approx(0.4)
    assert overall.success_a, overall.success_b == (0.4, 0.8)
    assert overall.success.mean == pytest.approx(0.4)
    # Sums 1, 1/2, -1/2, 1: |S| >= 2 for 1+1±½±½ ≥ 2 or all negated: (+,+) with ½-½ = 0 twice or ½+½: 3, twice → 6/16
    assert overall.p_value == 6 / 16
    assert (result.a, result.b) == ("one@v000003-dev-01", "two@v000003-dev-01")
    assert result.unpaired == {} and result.warnings == ()


def test_pairing_shows_what_two_intervals_cannot():
    """Tasks differ far more than the versions do: each alone has a wide interval, the difference a narrow one."""
    easy_and_hard = [0.0, 1.0] * 20
    better = [value + 0.1 for value in easy_and_hard]
    overall = compare(*two(scores(*easy_and_hard), scores(*better))).overall
    assert overall.score.low == pytest.approx(0.1) and overall.score.high == pytest.approx(0.1)
    assert overall.p_value < 0.001


def test_samples_of_a_task_are_one_cluster():
    many = compare(*two(trials("a", "0" * 30), trials("a", "1" * 30)))
    assert many.overall.p_value == 1.0, "one task, however often it was played, is one coin"
    assert (many.overall.score.low, many.overall.score.high) == (None, None)
    assert many.verdict.startswith("no difference shown")


def test_the_verdict_names_the_better_one():
    bad, good = scores(*[0.0] * 12), scores(*[1.0] * 12)
    up = compare(*two(bad, good)).verdict
    assert up.startswith("two@v000003-dev-01 is better than one@v000003-dev-01: score +1.000")
    assert "12 pairs of 12 tasks" in up
    down = compare(*two(good, bad)).verdict
    assert down.startswith("one@v000003-dev-01 is better than two@v000003-dev-01: score -1.000")
    assert compare(*two(good, good)).verdict.startswith("no difference shown")


def test_what_cannot_be_paired_is_counted_by_reason():
    a = [outcome("x"), outcome("y", None), outcome("z"), outcome("v", None), *trials("w", "111")]
    b = [outcome("x"), outcome("y"), outcome("z", None), outcome("v", None), *trials("w", "11"), outcome("new")]
    result = compare(*two(a, b))
    assert result.overall.pairs == 3
    assert result.unpaired == {
        "no score in a": 1,
        "no score in b": 1,
        "no score in either": 1,
        "only in a": 1,
        "only in b": 1,
    }


def test_a_task_played_twice_under_one_seed_gives_two_pairs():
    result = compare(*two([outcome("x", 0.0), outcome("x", 0.0)], [outcome("x", 1.0), outcome("x", 1.0)]))
    assert (result.overall.pairs, result.overall.tasks, result.overall.wins) == (2, 1, 2)


def test_environments_apart():
    a = [outcome("x", 0.0), outcome("x", 1.0, environment="maze")]
    b = [outcome("x", 1.0), outcome("x", 0.0, environment="maze")]
    result = compare(*two(a, b))
    assert {name: each.score.mean for name, each in result.environments.items()} == {"counter": 1.0, "maze": -1.0}
    assert result.overall.score.mean == 0.0


@pytest.mark.parametrize(
    ("b", "cause"),
    [
        (evaluation([outcome("y")], split="hidden"), "split dev, the other hidden"),
        (evaluation([outcome("x", environment="maze")]), "other environments"),
        (evaluation([outcome("y")]), "other tasks"),
        (evaluation([outcome("x", seed=8)]), "the same tasks under other seeds.*--seed"),
        (evaluation([outcome("x", sample=3)]), "other samples"),
        (evaluation([outcome("x", None)]), "no pair has a valid score"),
        (evaluation([]), "no episodes"),
    ],
)
def test_what_does_not_pair_at_all_is_refused_with_the_cause(b, cause):
    with pytest.raises(ConfigError, match=f"cannot be compared: .*{cause}"):
        compare(evaluation([outcome("x")]), b)


def test_what_else_differs_is_a_warning():
    one = evaluation(scores(1.0, 0.0), digests={"recipe": "1", "code": "1", "renderer": "1"})
    two = evaluation(scores(1.0, 0.0), digests={"recipe": "2", "code": "1"})
    assert [warning.split()[0] for warning in compare(one, two).warnings] == ["recipe", "renderer"]
