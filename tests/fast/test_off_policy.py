"""How far tokens are off policy: effective sample sizes, buckets and warnings by hand, and that a step reports them."""

import math

import numpy as np
import pytest
from learner_kit import World, tiny_backend
from loss_kit import samples_of

from headrace.platform.config import GrpoConfig
from headrace.trainer.algorithms import build_algorithm
from headrace.trainer.off_policy import joined, sequence_sums


def sums(ratios: list[list[float]], lags: list[int] | None = None):
    """Of sequences with these log ratios."""
    samples = samples_of([len(one) for one in ratios], lags or [0] * len(ratios))
    row = np.repeat(np.arange(len(ratios)), [len(one) for one in ratios])
    log_ratio = np.concatenate([np.array(one) for one in ratios])
    nothing = np.zeros(len(row))
    return sequence_sums(samples, row, log_ratio=log_ratio, ratio=np.exp(log_ratio), clipped=nothing, kl=nothing)


def test_effective_shares_by_hand():
    """Tokens weigh 1 1 2: 16 / 6 of 3. Their sequences weigh 1 and 2: 9 / 5 of 2."""
    found = sums([[0.0, 0.0], [math.log(2.0)]]).all()
    assert (found.tokens, found.sequences) == (3, 2)
    assert found.token_share == pytest.approx(16 / 18)
    assert found.sequence_share == pytest.approx(9 / 10)
    assert found.ratio_mean == pytest.approx(4 / 3)


def test_huge_weights_stay_finite():
    found = sums([[20.0] * 1000, [0.0]]).all()
    assert found.sequence_share == pytest.approx(0.5)
    assert found.token_share == pytest.approx(1000 / 1001)


def test_fresh_tokens_give_no_warning():
    found = sums([[0.0] * 10] * 10).all()
    assert (found.tokens, found.sequences, found.token_share, found.sequence_share) == (100, 10, 1.0, 1.0)
    assert found.warning == ""


@pytest.mark.parametrize(
    ("ratios", "words"),
    [
        ([[6.0], [-1.0]], "a token's log ratio is 6.0 nats"),
        ([[3.0]] + [[0.0]] * 99, "100 tokens weigh as much as 28."),
        ([[0.5] * 10] + [[0.0] * 10] * 19, "20 sequences weigh as much as 1.3"),
    ],
)
def test_a_warning_says_what_is_about_to_explode(ratios, words):
    warning = sums(ratios).all().warning
    assert warning.startswith("importance weights are about to explode: ")
    assert words in warning


def test_buckets_of_lag_and_length():
    """Lengths 1, 64 | 65, 256 | 257 are three buckets; microbatches are joined."""
    lengths, lags = [1, 64, 65, 256, 257], [0, 1, 0, 1, 3]
    parts = [sums([[0.0] * n], [lag]) for n, lag in zip(lengths, lags, strict=True)]
    both = joined(parts)
    assert {lag: found.tokens for lag, found in both.by_lag().items()} == {0: 66, 1: 320, 3: 257}
    assert {most: found.sequences for most, found in both.by_length().items()} == {64: 2, 256: 2, 1024: 1}
    assert both.all().tokens == sum(lengths)


async def test_a_step_reports_them_and_warns(tmp_path, caplog):
    world = World(tmp_path)
    learner = world.learner(tiny_backend(world.config), build_algorithm(GrpoConfig()))
    await learner.start()
    await world.play(2, version=0)
    report = await learner.step()
    assert report.off_policy is not None
    assert report.off_policy.tokens == report.loss_tokens == report.by_lag[0].tokens == report.by_length[64].tokens
    assert report.off_policy.ratio_mean == report.ratio_mean
    warned = [record.message for record in caplog.records if "importance weights" in record.message]
    assert bool(warned) is bool(report.off_policy.warning)
