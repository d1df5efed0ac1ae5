"""What the run root says to a ledger that lost writes, worked by hand (P6, P8, P14; case Q21)."""

import pytest
from chain_kit import group, manifest, member, row

from headrace.platform.ledger.chain import believed, chain_of, lineage, newest
from headrace.platform.ledger.policy import NO_VERSION
from headrace.platform.records.delivery import Chain, ChainVersion
from headrace.platform.testing.conformance.ledger_harness import limits

LIMITS = limits(max_lag=1)


def told(manifests, *, checkpoints=(0,), known_head=None, rows=(), sequence=0, highest=-1, limits=LIMITS) -> Chain:
    return chain_of(
        believed(manifests, limits),
        epoch=3,
        highest=highest,
        checkpoints=checkpoints,
        known_head=known_head,
        rows=rows,
        group_size=2,
        sequence=sequence,
    )


LINE = [
    manifest(0, None),
    manifest(1, 0, group(0, 1, 0)),
    manifest(2, 1, group(1, 2, 1)),
    manifest(3, 2, group(2, 3, 2)),
]


# --- what is believed (P6, P8) ---


def test_the_newest_version_of_the_last_learner_goes_on():
    """Fence 2 resumed from 1 and published 4; fence 1 had gone on to 3, which is an orphan."""
    chain = believed([*LINE, manifest(4, 1, group(3, 4, 1), fence=2, batches=2)], LIMITS)
    assert newest(chain) == 4
    assert lineage(chain, 4) == [0, 1, 4]
    assert lineage(chain, 3) == [0, 1, 2, 3]
    assert lineage(chain, 9) == []


def test_a_fenced_learner_with_a_larger_number_does_not_go_on():  # case Q18
    chain = believed([manifest(0, None), manifest(1, 0, fence=2), manifest(2, 0, fence=1)], LIMITS)
    assert newest(chain) == 1


def test_without_manifests_there_is_no_version():
    assert newest({}) == NO_VERSION
    assert told([]) == Chain(
        epoch=3, head=-1, settled=-1, next_number=0, versions=(), consumed=(), sequence=0, fates={}
    )


def test_a_version_without_its_ancestors_is_not_adopted():
    """The manifest of 2 is torn, so 3 hangs in the air."""
    chain = believed([LINE[0], LINE[1], LINE[3]], LIMITS)
    assert list(chain) == [0, 1]
    assert newest(chain) == 1


def test_a_version_that_names_another_parent_is_not_adopted():  # P6
    assert list(believed([*LINE[:2], manifest(2, 1, hash_of="another content")], LIMITS)) == [0, 1]


@pytest.mark.parametrize(
    ("oldest", "max_lag", "adopted"),
    [(2, 0, True), (1, 0, False), (1, 1, True), (0, 1, False), (0, 2, True), (9, 9, False)],
)
def test_a_version_that_the_ledger_refused_for_its_lag_is_not_adopted(oldest, max_lag, adopted):
    """P7, P14: over parent 2 with B = 2, a member sampled from v has lag 2 - v; version 9 does not exist."""
    last = manifest(3, 2, group(2, 3, 2, member(0, 2), member(1, oldest)))
    chosen = limits(max_lag=max_lag)
    line = [manifest(0, None), manifest(1, 0), manifest(2, 1), last]
    assert (3 in believed(line, chosen)) is adopted


def test_lag_is_counted_along_the_lineage():
    """Case Q20: 4 follows 0 after a rollback, so an episode of 0 has lag 0, whatever came between."""
    back = manifest(4, 0, group(5, 4, 0), fence=2, batches=1)
    assert newest(believed([*LINE, back], limits(max_lag=0))) == 4


def test_under_mask_the_newest_token_decides():
    """P15: over parent 2, a group with one member of versions 0 to 2 has a live token; one of 0 alone has none."""
    line = [manifest(0, None), manifest(1, 0), manifest(2, 1)]
    alive = manifest(3, 2, group(2, 3, 0, member(0, 0, newest=2), member(1, 0)))
    dead = manifest(3, 2, group(2, 3, 0, member(0, 0), member(1, 0)))
    chosen = limits(max_lag=1, mask_over_lag=True)
    assert newest(believed([*line, alive], chosen)) == 3
    assert newest(believed([*line, dead], chosen)) == 2


def test_members_that_were_left_out_do_not_count():
    """The learner found one member over the limit at train start and dropped it in the same commit."""
    last = manifest(3, 2, group(2, 3, 2, member(0, 2), member(1, 0, "dropped:lag")))
    assert newest(believed([manifest(0, None), manifest(1, 0), manifest(2, 1), last], LIMITS)) == 3


def test_a_version_that_consumed_what_its_ancestor_had_is_not_adopted():
    """P1: the ledger refused it. After a rollback to 0 the same group is consumed again, and rightly."""
    twice = manifest(2, 1, group(0, 2, 1))
    again = manifest(3, 0, group(0, 3, 0), fence=2, batches=1)
    assert list(believed([*LINE[:2], twice, again], LIMITS)) == [0, 1, 3]


# --- what the ledger is told ---


def test_versions_come_as_their_manifests_state_them():
    chain = told([LINE[0], manifest(1, 0, batches=4)])
    assert chain.versions == (
        ChainVersion(number=0, parent=-1, batches=0, fence=1, content_hash="content-0"),
        ChainVersion(number=1, parent=0, batches=4, fence=1, content_hash="content-1"),
    )


def test_numbers_are_never_used_again():  # P6
    assert told(LINE).next_number == 4
    assert told(LINE, highest=7).next_number == 8


@pytest.mark.parametrize(
    ("checkpoints", "known_head", "groups"),
    [
        ((0, 2), 3, [2]),  # nothing lost: what is not settled
        ((0, 2), 1, [1, 2]),  # version 2 was lost, though it is settled
        ((0, 2), None, [2]),  # an empty server: the settled ones are in the totals
        ((0,), 2, [0, 1, 2]),
        ((3,), 3, []),
    ],
)
def test_groups_are_named_that_may_come_again_or_are_not_known(checkpoints, known_head, groups):
    chain = told(LINE, checkpoints=checkpoints, known_head=known_head)
    assert [one.group for one in chain.consumed] == groups
    assert chain.settled == max(checkpoints)


def test_a_checkpoint_beside_the_lineage_settles_nothing():
    """Fence 1 completed the checkpoint of 3 after fence 2 had resumed from 1."""
    chain = told([*LINE, manifest(4, 1, group(3, 4, 1), fence=2, batches=2)], checkpoints=(1, 3), known_head=4)
    assert (chain.head, chain.settled) == (4, 1)
    assert [one.group for one in chain.consumed] == [3], "what an orphan consumed is not consumed"


def test_the_sequence_is_above_every_group_that_is_known():
    """Group 2 is in a manifest, group 4 in the fate table; the checkpoint knows of 9 groups."""
    assert told(LINE).sequence == 3
    assert told(LINE, rows=[row(4, 0, "failed:environment")]).sequence == 5
    assert told(LINE, rows=[row(4, 0, "failed:environment")], sequence=9).sequence == 9


def test_the_last_row_of_an_attempt_counts():
    rows = [row(0, 0, "trained", 1), row(0, 0, "in_flight"), row(0, 0, "dropped:stopped"), row(0, 1, "dropped:stopped")]
    assert told([LINE[0]], rows=rows).fates == {"dropped:stopped": 2}


def test_manifests_overrule_the_table():
    """The table says that group 0 was dropped; version 1 trained it. Group 1 is in no table yet."""
    rows = [row(0, 0, "dropped:lag"), row(0, 1, "trained", 1)]
    assert told(LINE[:3], rows=rows).fates == {"trained": 4}


def test_training_that_was_undone_is_none():
    """Version 3 is an orphan: what it trained has no end. Nobody can deliver it any more, so it is lost (P3)."""
    rows = [row(2, 0, "trained", 3), row(2, 1, "trained", 3)]
    chain = told([*LINE, manifest(4, 2, group(3, 4, 2), fence=2, batches=3)], rows=rows)
    assert chain.fates == {"trained": 6, "failed:infrastructure": 2}


def test_slots_of_which_nothing_is_known_are_lost():
    """P3: 4 groups of 2 were dispatched; group 0 is trained, one attempt of group 1 failed and its retry is not known,
    and nothing at all was heard of the other 5 slots."""
    rows = [row(1, 0, "failed:environment")]
    chain = told(LINE[:2], rows=rows, sequence=4)
    assert chain.fates == {"trained": 2, "failed:environment": 1, "failed:infrastructure": 5}
    assert sum(chain.fates.values()) == 8
