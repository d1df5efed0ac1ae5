"""The learning rate, step by step, worked by hand."""

import pytest
from pydantic import ValidationError

from headrace.platform.config.learner import LearnerConfig
from headrace.trainer.schedule import learning_rate


def rates(**options):
    config = LearnerConfig(**options)
    return [learning_rate(config, done) for done in range(config.steps + 2)]


def test_without_a_schedule_the_rate_is_what_it_always_was_to_the_last_digit():
    config = LearnerConfig(lr=3e-4, warmup=7, steps=20)
    for done in range(25):
        assert learning_rate(config, done) == 3e-4 * min(1.0, (done + 1) / max(7, 1))


def test_a_linear_schedule_goes_down_evenly_from_the_end_of_the_warm_up():
    # Warm-up 0.5, 1; then 3 steps from 1 to 0.4, 0.2 apart; steps beyond the last have the last one's rate.
    assert rates(lr=1.0, warmup=2, steps=5, schedule="linear", lr_end=0.4) == pytest.approx(
        [0.5, 1.0, 0.8, 0.6, 0.4, 0.4, 0.4]
    )


def test_a_cosine_schedule_is_half_way_down_in_the_middle_and_ends_at_a_tenth():
    # cos(pi / 4) = 0.7071: (1 + 0.7071) / 2 = 0.8536; of the way from 2 to 0.2.
    assert rates(lr=2.0, warmup=0, steps=5, schedule="cosine") == pytest.approx(
        [2.0, 1.73640, 1.1, 0.46360, 0.2, 0.2, 0.2], abs=1e-5
    )


def test_the_first_step_has_the_whole_rate_without_a_warm_up():
    assert rates(lr=1.0, warmup=0, steps=2, schedule="linear", lr_end=0.5)[:2] == [1.0, 0.5]


def test_a_schedule_without_a_step_after_the_warm_up_is_refused_with_what_to_do():
    with pytest.raises(ValidationError, match=r"warmup of 5 in steps=5; warm up for fewer steps"):
        LearnerConfig(warmup=5, steps=5, schedule="cosine")
