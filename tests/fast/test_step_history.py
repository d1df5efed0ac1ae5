"""Which groups a learner step was taken on, from manifests and receipts made by hand."""

import pytest
from chain_kit import group, manifest, member

from headrace.platform.errors import NotFound
from headrace.platform.records.delivery import LedgerLimits
from headrace.platform.records.tables import Receipt
from headrace.trainer.step_history import StepHistory

LIMITS = LedgerLimits(batch_groups=1, max_lag=2)


def history(*manifests, receipts=()) -> StepHistory:
    return StepHistory(manifests, receipts, LIMITS)


def receipt(name: str, version: int, step: int) -> Receipt:
    return Receipt(episode_id=name, version=version, advantages=(), step=step)


def test_each_version_of_one_step_has_its_groups_in_the_order_of_training():  # P8
    steps = history(
        manifest(0, None), manifest(1, 0, group(4, 1, 0), group(2, 1, 0)), manifest(2, 1, group(7, 2, 1))
    ).steps(0, 2)
    assert [(one.step, one.version.ref.number, one.publishes) for one in steps] == [(1, 1, True), (2, 2, True)]
    assert [[leased.group for leased in one.groups] for one in steps] == [[4, 2], [7]]
    (first, second) = steps[0].groups[0].members
    assert (str(first.attempt_id), first.payload_hash, first.score) == ("r.t4.0.0", "hash 0.0", 0.0)
    assert (second.attempt_id.sample, second.score, second.payload) == (1, 1.0, b"")


def test_lags_are_those_of_the_weights_that_the_step_started_from():  # P14
    steps = history(manifest(0, None), manifest(1, 0, group(0, 1, 0)), manifest(3, 1, group(1, 3, 0), batches=2)).steps(
        0, 2
    )
    assert [(one.start.parent, one.start.ahead) for one in steps] == [(0, 0), (1, 0)]
    assert steps[1].start.lag(0, 2, 9) == 1


def test_a_version_that_came_later_was_not_known_then():  # P14
    steps = history(manifest(0, None), manifest(1, 0, group(0, 1, 0)), manifest(2, 1, group(1, 2, 1))).steps(0, 1)
    assert steps[0].start.lag(1, 2, 9) == 9


def test_receipts_divide_a_version_of_several_steps():
    last = manifest(1, 0, group(0, 1, 0), group(1, 1, 0), group(2, 1, 0), batches=2)
    rows = [receipt("r.t0.0.0", 1, 1), receipt("r.t1.0.0", 1, 1), receipt("r.t2.0.0", 1, 2)]
    steps = history(manifest(0, None), last, receipts=rows).steps(0, 1)
    assert [(one.step, one.publishes, [g.group for g in one.groups]) for one in steps] == [
        (1, False, [0, 1]),
        (2, True, [2]),
    ], "the step is compared where it was published"
    assert [one.start.ahead for one in steps] == [0, 1]


def test_without_receipts_of_steps_it_is_refused():
    last = manifest(1, 0, group(0, 1, 0), group(1, 1, 0), batches=2)
    for rows in ([], [receipt("r.t0.0.0", 1, 1)], [receipt("r.t0.0.0", 1, 1), receipt("r.t1.0.0", 9, 2)]):
        with pytest.raises(NotFound, match="no receipt says in which of them group"):
            history(manifest(0, None), last, receipts=rows).steps(0, 2)


def test_a_member_that_left_for_lag_is_part_of_the_group():  # P15
    gone = group(0, 1, 0, member(0, 0), member(1, 0, "dropped:lag"), member(2, 0))
    (step,) = history(manifest(0, None), manifest(1, 0, gone)).steps(0, 1)
    assert [each.attempt_id.sample for each in step.groups[0].members] == [0, 1, 2]


def test_what_is_beside_the_lineage_is_no_step_of_the_run():  # P6
    dead = manifest(2, 1, group(1, 2, 1))
    alive = manifest(3, 1, group(1, 3, 1), fence=2, batches=2)
    told = history(manifest(0, None), manifest(1, 0, group(0, 1, 0)), dead, alive)
    assert told.last == 2
    assert told.step_of(2) is None and told.step_of(3) == 2
    assert [one.version.ref.number for one in told.steps(1, 2)] == [3]


@pytest.mark.parametrize("step", [0, 3])
def test_a_step_that_was_not_published_is_named_with_those_that_were(step):
    told = history(manifest(0, None), manifest(1, 0, group(0, 1, 0)), manifest(2, 1, group(1, 2, 1)))
    with pytest.raises(NotFound, match=f"no learner step {step}; the run has published the steps 1 to 2"):
        told.steps(0, step)
