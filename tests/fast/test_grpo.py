"""GRPO's advantages on numbers worked by hand."""

import math

import pytest

from headrace.platform.config import GrpoConfig
from headrace.platform.contracts import Algorithm
from headrace.platform.testing.conformance.algorithm import scored
from headrace.trainer.algorithms import Grpo, build_algorithm


def grpo() -> Algorithm:
    return build_algorithm(GrpoConfig())


def test_advantages_by_hand():
    """Scores 1 0 0 0: mean 1/4, squared deviations 9/16 + 3/16 = 3/4, unbiased variance 1/4, std 1/2."""
    algorithm = Grpo(GrpoConfig(epsilon=0.5))
    values = algorithm.advantages([scored(i, s, turns=2) for i, s in enumerate([1.0, 0.0, 0.0, 0.0])])
    assert values == [[0.75, 0.75], [-0.25, -0.25], [-0.25, -0.25], [-0.25, -0.25]]


def test_two_members_by_hand():
    """Scores 1 0: mean 1/2, unbiased std 1/sqrt(2), so +-1/sqrt(2)."""
    first, second = Grpo(GrpoConfig(epsilon=1e-12)).advantages([scored(0, 1.0), scored(1, 0.0)])
    assert first[0] == pytest.approx(1 / math.sqrt(2))
    assert second[0] == pytest.approx(-1 / math.sqrt(2))


def test_without_the_deviation_by_hand():
    """Dr. GRPO: scores 1 0 0 0, mean 1/4, nothing divided."""
    algorithm = Grpo(GrpoConfig(scale="none"))
    values = algorithm.advantages([scored(i, s) for i, s in enumerate([1.0, 0.0, 0.0, 0.0])])
    assert values == [[0.75], [-0.25], [-0.25], [-0.25]]


def test_one_member_has_no_baseline():
    with pytest.raises(ValueError, match="at least two"):
        grpo().advantages([scored(0, 1.0)])


def test_unequal_seeds_are_named():
    with pytest.raises(ValueError, match=r"test-run\.t0\.1\.0 played .* 5\) and test-run\.t0\.0\.0 .* 0\)"):
        grpo().advantages([scored(0, 1.0), scored(1, 0.0, seed=5)])
