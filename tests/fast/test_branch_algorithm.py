"""Branch: its advantages on numbers worked by hand, what of a continuation is trained, and its options."""

import msgspec
import numpy as np
import pytest
from pydantic import ValidationError

from headrace.platform.config.algorithm import RlooConfig
from headrace.platform.config.branch import BranchConfig
from headrace.platform.contracts import ScoredEpisode
from headrace.platform.records import AttemptId, Role
from headrace.platform.records.status import RewardKind
from headrace.platform.records.tables import RewardRow
from headrace.platform.testing.conformance.algorithm import ALGORITHM_SUITE, scored
from headrace.platform.testing.episodes import make_episode, plain_turn, policy_turn
from headrace.trainer.algorithms.branch import Branch
from headrace.trainer.algorithms.rloo import Rloo
from headrace.trainer.samples import build_samples, inherited_spans
from headrace.trainer.staleness import staleness


def branch_off(sample: int, score: float, trunk: ScoredEpisode, step: int, turns: int) -> ScoredEpisode:
    """A continuation of `trunk` from `step`, with `turns` turns of its own."""
    kept = trunk.episode.turns[: 1 + 2 * step]
    own = [turn for _ in range(turns) for turn in (policy_turn(token_ids=(7, 8)), plain_turn(Role.USER))]
    episode = make_episode(
        [*kept, *own[: 2 * turns - 1]],
        attempt_id=AttemptId("test-run", 0, sample),
        task=trunk.episode.task,
        parent_episode=trunk.episode.episode_id,
        branch_step=step,
    )
    return ScoredEpisode(episode, score)


def tree() -> list[ScoredEpisode]:
    """Two points, two continuations each: the trunk has four turns and a return of 1."""
    trunk = scored(0, 1.0, turns=4)
    fresh = [scored(1, 0.0, turns=1), scored(2, 1.0, turns=3)]
    return [trunk, *fresh, branch_off(3, 1.0, trunk, 2, 2), branch_off(4, 0.5, trunk, 2, 1)]


@pytest.mark.parametrize("check", ALGORITHM_SUITE.values(), ids=ALGORITHM_SUITE)
async def test_conformance(check):
    await check(lambda: Branch(BranchConfig()))


def test_by_hand():
    """V(reset) = (0 + 1) / 2 = 0.5 and V(step 2) = (1 + 0.5) / 2 = 0.75 as the trunk sees them.

    So the trunk's first two turns are worth 0.75 - 0.5 and its last two 1 - 0.75. A member from the reset has the mean
    of the trunk and the other one as its baseline: (1 + 1) / 2 and (1 + 0) / 2. A continuation has the trunk and its
    sibling: (1 + 0.5) / 2 and (1 + 1) / 2.
    """
    assert Branch(BranchConfig()).advantages(tree()) == [
        [0.25, 0.25, 0.25, 0.25],
        [-1.0],
        [0.5, 0.5, 0.5],
        [0.0, 0.0, 0.25, 0.25],
        [0.0, 0.0, -0.5],
    ]


def test_three_points_by_hand():
    """Points at the reset, steps 1 and 2, one continuation each, returns 0, 0.25 and 1; the trunk's is 0.5."""
    trunk = scored(0, 0.5, turns=3)
    group = [trunk, scored(1, 0.0), branch_off(2, 0.25, trunk, 1, 1), branch_off(3, 1.0, trunk, 2, 1)]
    assert Branch(BranchConfig(points=3, continuations=1)).advantages(group) == [
        [0.25, 0.75, -0.5],
        [-0.5],
        [0.0, -0.25],
        [0.0, 0.0, 0.5],
    ]


def test_the_order_of_members_changes_nothing():
    """Case V6."""
    algorithm = Branch(BranchConfig())
    assert algorithm.advantages(tree()[::-1]) == algorithm.advantages(tree())[::-1]


def test_a_common_bonus_changes_nothing():
    algorithm = Branch(BranchConfig())
    richer = [msgspec.structs.replace(one, score=one.score + 8.0) for one in tree()]
    assert algorithm.advantages(richer) == algorithm.advantages(tree())


def test_without_continuations_it_is_rloo():
    group = [scored(i, score, turns=i + 1) for i, score in enumerate([1.0, 0.0, 0.5, 0.25])]
    config = BranchConfig(points=1, continuations=3)
    assert Branch(config).advantages(group) == Rloo(RlooConfig()).advantages(group)


def test_values_are_of_those_who_are_there():
    """P18: whoever is missing is in no baseline, and a point without any continuation is none."""
    trunk, first, second, *others = tree()
    algorithm = Branch(BranchConfig())
    assert algorithm.advantages([trunk, first, second]) == [[0.5] * 4, [-1.0], [0.5] * 3]
    assert algorithm.advantages([trunk, *others])[0] == [0.0, 0.0, 0.25, 0.25], "nobody tells what the reset is worth"
    assert algorithm.advantages([first, second, *others]) == [
        [-1.0],
        [1.0, 1.0, 1.0],
        [0.0, 0.0, 0.5, 0.5],
        [0.0, 0.0, -0.5],
    ], "the trunk is missing"
    assert algorithm.advantages([first, second, others[0]])[2] == [0.0] * 4, "nothing to compare with"


def test_continuations_of_two_trunks_are_not_mixed():
    """An attempt of the trunk that was played again: members that branched off the one before keep to themselves."""
    trunk, first, second, third, _ = tree()
    again = msgspec.structs.replace(trunk.episode, attempt_id=AttemptId("test-run", 0, 0, 1))
    other = branch_off(4, 0.0, ScoredEpisode(again, 1.0), 2, 1)
    values = Branch(BranchConfig()).advantages([ScoredEpisode(again, 1.0), first, second, third, other])
    assert values[0] == [-0.5, -0.5, 1.0, 1.0]
    assert (values[3], values[4]) == ([0.0] * 4, [0.0, 0.0, -1.0])


def test_rewards_by_term_are_weighted_before_they_are_compared():
    rows = {0: (1.0, -0.5), 1: (0.0, -0.25)}
    group = [
        msgspec.structs.replace(
            scored(i, sum(values), turns=1),
            rewards=tuple(
                RewardRow(episode_id=str(i), kind=kind, value=value)
                for kind, value in zip((RewardKind.OUTCOME, RewardKind.COST), values, strict=True)
            ),
        )
        for i, values in rows.items()
    ]
    config = BranchConfig(points=1, continuations=1, returns={"cost": 2.0})
    assert Branch(config).advantages(group) == [[0.5], [-0.5]]


def test_a_turn_that_is_inherited_is_context_and_nothing_else():
    """T18: it is trained on once, in the trunk; the episode's own mask is not changed."""
    trunk, _, _, longer, _ = tree()
    assert longer.episode.inherited_turns == 5
    (sample,) = build_samples(longer.episode, [0.0, 0.0, 3.0, 3.0])
    assert sample.token_ids.tolist() == [t for turn in longer.episode.turns for t in turn.token_ids.tolist()]
    first_own = sum(len(turn.token_ids) for turn in longer.episode.turns[:5])
    assert not sample.loss_mask[:first_own].any() and not sample.action_mask[:first_own].any()
    assert sample.loss_tokens == longer.episode.action_tokens - 6 == 4
    assert np.unique(sample.advantages[sample.loss_mask == 1]).tolist() == [3.0]
    assert sample.sources[0].start == first_own
    assert [(span.turn, span.start, span.end, span.reason) for span in inherited_spans(longer.episode)] == [
        (1, 0, 3, "inherited"),
        (3, 0, 3, "inherited"),
    ]
    assert inherited_spans(trunk.episode) == ()
    assert trunk.episode.inherited_turns == 0
    assert build_samples(trunk.episode, [1.0] * 4)[0].loss_tokens == 12


def test_nothing_is_inherited_where_the_branch_never_began():
    trunk, *_ = tree()
    lost = msgspec.structs.replace(branch_off(3, 0.0, trunk, 2, 1).episode, turns=(), views=())
    assert lost.inherited_turns == 0
    assert msgspec.structs.replace(trunk.episode, branch_step=0).inherited_turns == 1


def test_lag_is_that_of_the_tokens_that_are_trained():
    """P14: turns of a trunk that another version sampled do not age what goes on from them."""
    trunk = scored(0, 1.0, turns=2)
    episode = branch_off(1, 0.0, trunk, 1, 1).episode
    newer = msgspec.structs.replace(episode, turns=(*episode.turns[:3], policy_turn(version=4)))
    stale = staleness(newer, 0, lambda version: 4 - version, 2)
    assert (stale.lag, stale.over, stale.live) == (0, (), True)


@pytest.mark.parametrize(
    ("given", "size"),
    [({}, 7), ({"points": 3}, 10), ({"points": 1, "continuations": 7}, 8), ({"continuations": "2"}, 5)],
)
def test_the_group_is_as_large_as_the_tree(given, size):
    assert BranchConfig(**given).group_size == size
    assert BranchConfig(**given, group_size=size).group_size == size


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"group_size": 8}, "set learner.algorithm.group_size=7"),
        ({"points": 0}, "points"),
        ({"points": "many"}, "points"),
        ({"returns": {"credit": "to_go"}}, "rloo and reinforce"),
    ],
)
def test_options_that_cannot_be_are_refused(given, told):
    with pytest.raises(ValidationError, match=told):
        BranchConfig(**given)
