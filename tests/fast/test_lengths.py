"""Trained shares by length decile, on histograms worked by hand."""

import pytest

from headrace.platform.evaluation.lengths import bucket_start_s, length_deciles


def test_nothing_ended_has_no_deciles():
    assert length_deciles({}) == []
    assert length_deciles({"trained": {}}) == []


def test_shares_fall_where_long_attempts_are_lost():  # P16, case E17
    """50 short attempts are all trained; of 50 long ones 10 are: five deciles at 1, five at 0.2."""
    deciles = length_deciles({"trained": {0: 50, 8: 10}, "cancelled": {8: 30}, "dropped": {8: 10}})
    assert [round(each.share, 6) for each in deciles] == [1.0] * 5 + [0.2] * 5
    assert sum(each.ended for each in deciles) == pytest.approx(100)
    assert sum(each.trained for each in deciles) == pytest.approx(60)
    assert (deciles[0].from_s, deciles[-1].from_s) == (bucket_start_s(0), bucket_start_s(8)) == (1.0, 16.0)


def test_a_bucket_may_span_deciles_and_few_attempts_may_be_spread():
    deciles = length_deciles({"trained": {4: 3}})
    assert len(deciles) == 10
    assert all(each.share == pytest.approx(1.0) for each in deciles)
    assert sum(each.ended for each in deciles) == pytest.approx(3)


@pytest.mark.parametrize("count", [1, 7, 10, 999, 123457])
def test_deciles_are_tenths(count):
    deciles = length_deciles({"trained": dict.fromkeys(range(-8, 12, 3), count), "failed": {2: count}})
    total = sum(each.ended for each in deciles)
    assert len(deciles) == 10
    assert all(each.ended == pytest.approx(total / 10, rel=1e-6) for each in deciles)
