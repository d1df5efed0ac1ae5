"""Drawing tokens: numbers worked by hand, and the limits of the interval."""

import numpy as np
import pytest

from headrace.platform.records.generation import SamplingParams
from headrace.serving.sampling import draw, is_plain, uniforms

# Weights 1, 2, 5, 2 out of 10, so the cumulative sums are .1, .3, .8, 1.
LOGITS = np.log(np.array([1.0, 2.0, 5.0, 2.0], np.float32))


def draw_one(number, temperature=1.0, **sampling):
    params = SamplingParams(temperature=temperature, **sampling)
    truncated = {} if is_plain(params) else {0: params}
    tokens, logprobs = draw(LOGITS[None], np.array([temperature]), np.array([number]), truncated)
    return int(tokens[0]), float(logprobs[0])


@pytest.mark.parametrize(
    ("number", "token", "probability"),
    [(0.0, 0, 0.1), (0.09, 0, 0.1), (0.11, 1, 0.2), (0.31, 2, 0.5), (0.79, 2, 0.5), (0.81, 3, 0.2), (0.99, 3, 0.2)],
)
def test_inverse_transform(number, token, probability):
    drawn, logprob = draw_one(number)
    assert drawn == token
    assert logprob == pytest.approx(np.log(probability), abs=1e-6)


def test_temperature_squares_at_one_half():
    # Weights 1, 4, 25, 4 out of 34.
    token, logprob = draw_one(0.5, temperature=0.5)
    assert token == 2
    assert logprob == pytest.approx(np.log(25 / 34), abs=1e-6)


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        ({"top_k": 1}, {2: 1.0}),
        ({"top_k": 3}, {1: 2 / 9, 2: 5 / 9, 3: 2 / 9}),
        ({"top_p": 0.45}, {2: 1.0}),
        ({"top_p": 0.6}, {1: 2 / 7, 2: 5 / 7}),
        ({"min_p": 0.39}, {1: 2 / 9, 2: 5 / 9, 3: 2 / 9}),
        ({"min_p": 0.41}, {2: 1.0}),
        ({"top_k": 2, "top_p": 0.7}, {2: 1.0}),
        ({"temperature": 0.0}, {2: 1.0}),
    ],
)
def test_truncation_renormalises(sampling, kept):
    drawn = [draw_one(number, **sampling) for number in np.linspace(0.001, 0.999, 199)]
    assert {token for token, _ in drawn} == set(kept)
    for token, logprob in drawn:
        assert logprob == pytest.approx(np.log(kept[token]), abs=1e-6)


def test_only_the_row_that_asks_is_truncated():
    tokens, logprobs = draw(np.stack([LOGITS, LOGITS]), np.ones(2), np.full(2, 0.05), {1: SamplingParams(top_k=1)})
    assert tokens.tolist() == [0, 2]
    np.testing.assert_allclose(logprobs, [np.log(0.1), 0.0], atol=1e-6)


def test_a_token_without_weight_is_never_drawn():
    logits = np.array([[-np.inf, 0.0, -np.inf], [0.0, 0.0, -2000.0]], np.float32)
    for number in (0.0, 1.0 - 2.0**-53):
        tokens, _ = draw(logits, np.ones(2), np.full(2, number), {})
        assert tokens[0] == 1
        assert tokens[1] in (0, 1)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("truncated", [{}, {0: SamplingParams(top_p=0.5)}])
def test_a_row_without_distribution_spoils_no_other(bad, truncated):
    logits = np.stack([np.array([0.0, bad, 0.0, 0.0], np.float32), LOGITS])
    tokens, logprobs = draw(logits, np.ones(2), np.full(2, 0.5), truncated)
    assert tokens.tolist() == [-1, 2]
    assert logprobs[1] == pytest.approx(np.log(0.5), abs=1e-6)


def test_numbers_depend_on_seed_and_position_alone():
    seeds, positions = np.array([1, 1, 2, 2**64 - 1], np.uint64), np.array([0, 1, 0, 7])
    together = uniforms(seeds, positions)
    alone = [uniforms(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(4)]
    assert together.tolist() == alone
    assert len(set(alone)) == 4


def test_numbers_are_uniform_along_seeds_and_along_positions():
    count, bins = 20000, 20
    for seeds, positions in (
        (np.arange(count, dtype=np.uint64), np.zeros(count, np.int64)),
        (np.full(count, 3, np.uint64), np.arange(count)),
    ):
        numbers = uniforms(seeds, positions)
        assert numbers.min() >= 0 and numbers.max() < 1
        observed = np.histogram(numbers, bins, (0, 1))[0]
        chi_square = ((observed - count / bins) ** 2 / (count / bins)).sum()
        assert chi_square < 43.8  # the 0.999 quantile at 19 degrees of freedom
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03
