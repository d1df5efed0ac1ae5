"""Returns over turns and tokens, their terms, and where rewards belong."""

import msgspec
import numpy as np
import pytest

from headrace.platform.config.algorithm import ReturnsConfig
from headrace.platform.contracts import ScoredEpisode
from headrace.platform.records import Role, f32
from headrace.platform.records.status import RewardKind
from headrace.platform.records.tables import RewardRow, score_of
from headrace.platform.testing.episodes import make_episode, plain_turn, policy_turn
from headrace.trainer.credit import place_rewards
from headrace.trainer.returns import discounted, return_terms, returns_by_turn, rewards_by_turn, token_returns

EPISODE = make_episode(
    [
        plain_turn(Role.USER),
        policy_turn(),
        plain_turn(Role.TOOL, token_ids=range(500)),
        policy_turn(),
        plain_turn(Role.TOOL),
    ]
)


def row(kind: RewardKind, value: float | None, turn: int | None = None) -> RewardRow:
    return RewardRow(episode_id=EPISODE.episode_id, kind=kind, value=value, valid=value is not None, turn=turn)


ROWS = (
    row(RewardKind.OUTCOME, 1.0),
    row(RewardKind.FORMAT, 0.5, turn=1),
    row(RewardKind.COST, -0.25, turn=1),
    row(RewardKind.COST, -0.25, turn=3),
    row(RewardKind.SAFETY, -2.0),
    row(RewardKind.PROCESS, 0.125, turn=1),
    row(RewardKind.PROCESS, 1.0, turn=4),
)
MEMBER = ScoredEpisode(EPISODE, 0.125, ROWS)


def test_discounting_by_hand():
    """1, 0, 4 at 1/2: 1 + 0 + 1, 0 + 2, 4."""
    assert discounted(np.array([1.0, 0.0, 4.0]), 0.5).tolist() == [2.0, 2.0, 4.0]
    assert discounted(np.array([]), 0.5).tolist() == []


def test_masked_tokens_neither_discount_nor_reset():
    """case T13: mask 1 0 1, reward 1 on the last, 1/2 per action: the first action is one step away, not two."""
    mask = np.array([1, 0, 1], np.uint8)
    assert token_returns(mask, f32([0, 0, 1]), 0.5).tolist() == [0.5, 0.0, 1.0]


def test_a_reward_on_a_masked_token_counts_as_the_last_actions():
    """case T12"""
    mask = np.array([1, 0, 1, 0], np.uint8)
    assert token_returns(mask, place_rewards(mask, f32([0, 0, 0, 1])), 0.5).tolist() == [0.5, 0.0, 1.0, 0.0]


def test_the_terms_are_kept_apart():
    """case T12 too: the reward on the tool's answer, turn 4, belongs to the policy's turn before it."""
    terms = return_terms(EPISODE, ROWS)
    assert (terms.task, terms.cost, terms.safety) == (1.5, -0.5, -2.0)
    assert terms.process.tolist() == [0.125, 1.0]


def test_potentials_are_no_rewards_unless_shaping_asks_for_them():
    """Potentials 2 and 4 after the two turns, gamma 1/2: turns earn 1/2 * 2 - 0 and, at the end, 0 - 2 besides; the
    second one's -2 is -1 at the first. A turn without a row leaves the state as it was."""
    said = row(RewardKind.POTENTIAL, 2.0, turn=1), row(RewardKind.POTENTIAL, 4.0, turn=3)
    plain = ReturnsConfig(credit="to_go", gamma=0.5)
    shaped = plain.model_copy(update={"shaping": True})
    known = returns_by_turn(MEMBER, plain)
    member = msgspec.structs.replace(MEMBER, rewards=(*ROWS, *said))
    assert returns_by_turn(member, plain).tolist() == known.tolist()
    assert (returns_by_turn(member, shaped) - known).tolist() == [1.0 - 1.0, -2.0]
    once = msgspec.structs.replace(MEMBER, rewards=(*ROWS, said[0]))
    assert (returns_by_turn(once, shaped) - known).tolist() == [1.0 - 1.0, -2.0]
    assert score_of(member.rewards) == score_of(MEMBER.rewards)
    assert score_of(said) is None


def test_of_several_states_before_a_turn_the_last_ones_potential_counts():
    """Two answers before the policy's second turn, worth 2 and 4: the state there is worth 4, not 6. Rows of one turn
    are parts of one potential: 1 + 3."""
    later = (row(RewardKind.POTENTIAL, 2.0, turn=1), row(RewardKind.POTENTIAL, 4.0, turn=2))
    parts = (row(RewardKind.POTENTIAL, 2.0, turn=1), *(row(RewardKind.POTENTIAL, each, turn=2) for each in (1.0, 3.0)))
    shaped = ReturnsConfig(credit="to_go", gamma=0.5, shaping=True)
    found = [
        returns_by_turn(msgspec.structs.replace(MEMBER, rewards=(*ROWS, *said)), shaped).tolist()
        for said in (later, parts, later[1:])
    ]
    assert found[0] == found[1] == found[2]


def test_a_potential_that_is_not_valid_matters_to_shaping_alone():
    member = msgspec.structs.replace(MEMBER, rewards=(*ROWS, row(RewardKind.POTENTIAL, None, turn=1)))
    assert returns_by_turn(member, ReturnsConfig(cost=2.0)).tolist()
    with pytest.raises(ValueError, match=r"a potential reward of .* is not valid"):
        returns_by_turn(member, ReturnsConfig(credit="to_go", shaping=True))


def test_the_decomposition_by_hand():
    """Task 1.5 - 2 * 0.5 - 0.5 * 2 = -0.5 at every turn; process to go 0.125 + 1/2 and 1."""
    config = ReturnsConfig(credit="to_go", gamma=0.5, cost=2.0, safety=0.5)
    assert returns_by_turn(MEMBER, config).tolist() == [0.125, 0.5]
    whole = ReturnsConfig(gamma=0.5, cost=2.0, safety=0.5)
    assert returns_by_turn(MEMBER, whole).tolist() == [0.125, 0.125]


def test_weights_of_one_give_the_score():
    """With all weights 1 and no discount the whole is the sum of the rows, which is the score."""
    assert sum(r.value for r in ROWS) == MEMBER.score
    nearly = ReturnsConfig(credit="to_go")
    assert returns_by_turn(MEMBER, nearly)[0] == returns_by_turn(MEMBER, ReturnsConfig())[0] == MEMBER.score


def test_observation_tokens_are_no_time():
    """case T14: the 500 tokens of the tool's answer are one transition; its length changes nothing."""
    short = make_episode([*EPISODE.turns[:2], plain_turn(Role.TOOL, token_ids=[1]), *EPISODE.turns[3:]])
    config = ReturnsConfig(credit="to_go", gamma=0.5)
    other = ScoredEpisode(short, MEMBER.score, ROWS)
    assert returns_by_turn(other, config).tolist() == returns_by_turn(MEMBER, config).tolist()


def test_rewards_where_they_were_earned():
    """Turn 1: 0.5 - 0.25 + 0.125; the last turn: 1 - 0.25 - 2 + 1. With costs doubled each loses another 0.25."""
    assert rewards_by_turn(MEMBER, ReturnsConfig()).tolist() == [0.375, -0.25]
    assert rewards_by_turn(MEMBER, ReturnsConfig(cost=2.0)).tolist() == [0.125, -0.5]
    assert rewards_by_turn(ScoredEpisode(EPISODE, 0.75), ReturnsConfig()).tolist() == [0.0, 0.75]


def test_an_episode_without_actions_has_one_return_that_nobody_earned():
    silent = ScoredEpisode(make_episode([plain_turn(Role.USER)]), 0.5, (row(RewardKind.PROCESS, 0.5, turn=0),))
    assert returns_by_turn(silent, ReturnsConfig()).tolist() == [0.5]
    assert returns_by_turn(silent, ReturnsConfig(credit="to_go")).tolist() == [0.5]


@pytest.mark.parametrize("kind", [RewardKind.OUTCOME, RewardKind.PROCESS])
def test_what_is_not_valid_is_no_number(kind):
    """Failure is never a reward, and neither is it 0."""
    broken = ScoredEpisode(EPISODE, 0.0, (row(kind, None),))
    with pytest.raises(ValueError, match="not valid"):
        returns_by_turn(broken, ReturnsConfig(cost=2.0))
    with pytest.raises(ValueError, match="not valid"):
        rewards_by_turn(broken, ReturnsConfig())
