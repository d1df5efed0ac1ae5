"""When the learner holds a step for groups that it would push over the lag limit, worked by hand (P15, P16)."""

import pytest

from headrace.platform.config import QueueConfig
from headrace.platform.records.delivery import AtRisk
from headrace.trainer.pacing import Pace, Pacer, pace

NOBODY = AtRisk(playing=0, ready=0, protected=0)
PLAYING = AtRisk(playing=2, ready=0, protected=0)
READY = AtRisk(playing=0, ready=1, protected=0)
PROTECTED = AtRisk(playing=1, ready=0, protected=1)


@pytest.mark.parametrize(
    ("risk", "waited_s", "expected"),
    [
        (NOBODY, 0.0, Pace(True, False)),
        (PLAYING, 0.0, Pace(False, False)),
        (PLAYING, 59.9, Pace(False, False)),
        (READY, 0.0, Pace(True, False)),  # no waiting can save it
        (PLAYING, 60.0, Pace(True, False)),
        (PROTECTED, 59.9, Pace(False, False)),
        (PROTECTED, 60.0, Pace(True, True)),
    ],
)
def test_wait_holds_for_whatever_is_still_played_at_most_max_wait_s(risk, waited_s, expected):
    """P15"""
    queue = QueueConfig(over_lag="wait", max_wait_s=60.0)
    assert pace(risk, queue, waited_s=waited_s, protected_s=0.0, run_s=1000.0) == expected


@pytest.mark.parametrize("policy", ["drop", "mask"])
@pytest.mark.parametrize(
    ("risk", "protected_s", "expected"),
    [
        (PLAYING, 0.0, Pace(True, False)),
        (READY, 0.0, Pace(True, False)),
        (PROTECTED, 0.0, Pace(False, False)),
        (PROTECTED, 49.9, Pace(False, False)),
        (PROTECTED, 50.0, Pace(True, True)),
        (NOBODY, 50.0, Pace(True, False)),
    ],
)
def test_only_protected_groups_are_waited_for_within_their_share(policy, risk, protected_s, expected):
    """P16: 5 % of 1000 s; a refusal once they are spent is a length bias."""
    queue = QueueConfig(over_lag=policy, protect_share=0.05)
    assert pace(risk, queue, waited_s=1e6, protected_s=protected_s, run_s=1000.0) == expected


def test_a_share_of_nothing_protects_nobody():
    queue = QueueConfig(protect_share=0.0)
    assert pace(PROTECTED, queue, waited_s=0.0, protected_s=0.0, run_s=1000.0) == Pace(True, True)


def test_time_counts_as_held_from_refusal_to_refusal():
    pacer = Pacer(QueueConfig(over_lag="wait", max_wait_s=10.0), began_s=0.0)
    pacer.begin_step()
    assert not pacer.may_start(PLAYING, 100.0)
    assert not pacer.may_start(PLAYING, 104.0)
    assert pacer.may_start(NOBODY, 106.0)
    assert pacer.held_s == 6.0
    # The lease may find nothing after all; what passes until the next refusal was not the pacer's doing.
    assert not pacer.may_start(PLAYING, 120.0)
    assert pacer.may_start(PLAYING, 124.0), "6 + 4 seconds are all that one step may be held"
    assert (pacer.held_s, pacer.length_bias) == (10.0, False)
    pacer.begin_step()
    assert not pacer.may_start(PLAYING, 125.0)


def test_the_budget_for_protection_is_the_whole_runs():
    """P16: 10 % of the run; the second step finds what the first one left."""
    pacer = Pacer(QueueConfig(protect_share=0.1), began_s=0.0)
    pacer.begin_step()
    assert not pacer.may_start(PROTECTED, 100.0)
    assert not pacer.may_start(PROTECTED, 108.0)
    assert pacer.may_start(NOBODY, 109.0)
    assert pacer.held_s == 9.0
    pacer.begin_step()
    assert not pacer.may_start(PROTECTED, 110.0)
    assert pacer.may_start(PROTECTED, 113.0), "9 + 3 seconds of 113"
    assert pacer.length_bias
    pacer.begin_step()
    assert (pacer.held_s, pacer.length_bias) == (0.0, False)
    assert not pacer.may_start(PROTECTED, 200.0), "the run has gone on, and the budget with it"


@pytest.mark.parametrize(
    ("config", "asks"),
    [
        ({"over_lag": "wait", "lag_restarts": 0}, True),
        ({"over_lag": "drop", "lag_restarts": 2}, True),
        ({"over_lag": "mask", "lag_restarts": 0}, False),
    ],
)
def test_the_ledger_is_asked_only_where_the_answer_matters(config, asks):
    assert Pacer(QueueConfig(**config), 0.0).asks is asks
