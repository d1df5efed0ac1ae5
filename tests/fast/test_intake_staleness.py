"""Which tokens are over the lag limit, worked by hand (P14, case Q5)."""

import pytest
from msgspec.structs import replace

from headrace.platform.ledger.policy import VersionNode
from headrace.platform.records import Role
from headrace.platform.records.status import UpdateMode
from headrace.platform.records.tables import LossMaskReason, MaskedSpan
from headrace.platform.records.versions import VersionRef, VersionSpan
from headrace.platform.testing.episodes import make_episode, plain_turn, policy_turn
from headrace.trainer.staleness import Staleness, TrainStart, staleness

# 0 ── 1 ── 2 ── 5 (two batches)
#       └── 3 ── 4, orphans
LINEAGE = {
    0: VersionNode(-1, 0),
    1: VersionNode(0, 1),
    2: VersionNode(1, 2),
    3: VersionNode(1, 2),
    4: VersionNode(3, 3),
    5: VersionNode(2, 4),
}


@pytest.mark.parametrize(
    ("version", "ahead", "lag"),
    [(5, 0, 0), (5, 2, 2), (2, 0, 2), (0, 1, 5), (3, 0, 4), (4, 0, 5), (4, 3, 7), (9, 0, 6)],
)
def test_lag_is_the_path_between_versions_plus_what_is_unpublished(version, ahead, lag):
    """P14: above the limit, here 6, it is 7; version 9 was never heard of and counts as the ledger said, 6."""
    assert TrainStart(lineage=LINEAGE, parent=5, ahead=ahead).lag(version, 6, otherwise=6) == lag


def over(turn: int, start: int, end: int) -> MaskedSpan:
    return MaskedSpan(turn, start, end, LossMaskReason.LAG)


def in_flight_turn(*versions: int):
    """Two tokens of each version in one turn."""
    spans = tuple(VersionSpan(VersionRef("policy", v), 2 * i, 2 * i + 2) for i, v in enumerate(versions))
    return replace(policy_turn("x", range(2, 2 + 2 * len(versions))), version_spans=spans)


def test_the_oldest_live_token_gives_the_lag_and_older_ones_are_named():
    """case Q5: an episode that spans limit + 3 publishes; lag of version v is 9 - v and the limit 4."""
    turns = (plain_turn(Role.USER), in_flight_turn(2, 4, 5), plain_turn(Role.TOOL), policy_turn("b", version=9))
    episode = make_episode(turns, version=2, update_mode=UpdateMode.INFLIGHT)
    judged = staleness(episode, 2, lambda version: 9 - version, 4)
    assert judged == Staleness(4, (over(1, 0, 2), over(1, 2, 4)), live=True)


def test_an_episode_that_is_over_the_limit_throughout_is_not_live():
    turns = (plain_turn(Role.USER), policy_turn("a", version=1), policy_turn("b", version=2))
    judged = staleness(make_episode(turns, update_mode=UpdateMode.TURN), 1, lambda version: 9 - version, 4)
    assert judged == Staleness(8, (over(1, 0, 3), over(2, 0, 3)), live=False)


@pytest.mark.parametrize(("pinned", "live"), [(6, True), (1, False)])
def test_an_episode_without_a_token_is_judged_by_its_pinned_version(pinned, live):
    """case T20"""
    episode = make_episode((plain_turn(Role.USER), plain_turn(Role.ASSISTANT)))
    assert staleness(episode, pinned, lambda version: 9 - version, 4) == Staleness(9 - pinned, (), live)
