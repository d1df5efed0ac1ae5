"""GAE against a straightforward version, by hand, and over the three units of time."""

import numpy as np
import pytest

from headrace.platform.records import Role
from headrace.platform.records.status import ActionKind
from headrace.platform.testing.episodes import plain_turn, policy_turn
from headrace.trainer.algorithms.gae import first_of_steps, gae, gae_of_tokens, steps_of_tokens


def straightforward(rewards, values, gamma, lam, end):
    """The double sum of the paper, with the value after the last step given."""
    after = [*values[1:], end]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, after, values, strict=True)]
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))]


def turns(observation: int = 1):
    """Two, one and three action tokens; the second turn never reached the world."""
    said = [
        plain_turn(Role.USER),
        policy_turn(token_ids=[1, 2], action_kind=ActionKind.TOOL),
        plain_turn(Role.TOOL, token_ids=range(observation)),
        policy_turn(token_ids=[3]),
        plain_turn(Role.USER, token_ids=range(observation)),
        policy_turn(token_ids=[4, 5, 6], action_kind=ActionKind.SUBMIT),
    ]
    return [turn for turn in said if turn.is_action]


@pytest.mark.parametrize("truncated", [True, False])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (0.5, 0.0), (0.99, 0.95)])
def test_the_same_as_the_double_sum(gamma, lam, truncated):
    rng = np.random.default_rng(0)
    for K in (1, 2, 7):
        rewards, values = rng.normal(size=K), rng.normal(size=K)
        found = gae(rewards, values, gamma=gamma, lam=lam, truncated=truncated, next_value=3.0)
        expected = straightforward(rewards, values, gamma, lam, 3.0 if truncated else 0.0)
        np.testing.assert_allclose(found, expected, atol=1e-12)


def test_by_hand():
    """Rewards 0 1, values 0.5 0.5, gamma 1, lam 0.5. Terminated: deltas 0, 0.5, so 0.25, 0.5. Truncated with 2 to come:
    deltas 0, 2.5, so 1.25, 2.5."""
    rewards, values = np.array([0.0, 1.0]), np.array([0.5, 0.5])
    ended = gae(rewards, values, gamma=1.0, lam=0.5, truncated=False, next_value=2.0)
    assert ended.tolist() == [0.25, 0.5]
    cut = gae(rewards, values, gamma=1.0, lam=0.5, truncated=True, next_value=2.0)
    assert cut.tolist() == [1.25, 2.5]


def test_lengths_must_agree():
    with pytest.raises(ValueError, match="1 rewards and 2 values"):
        gae(np.zeros(1), np.zeros(2), gamma=1.0, lam=1.0, truncated=False)


@pytest.mark.parametrize(
    ("over", "expected"),
    [("token", [0, 1, 2, 3, 4, 5]), ("turn", [0, 0, 1, 2, 2, 2]), ("action", [0, 0, 1, 1, 1, 1])],
)
def test_what_a_step_is(over, expected):
    assert steps_of_tokens(turns(), over).tolist() == expected
    assert steps_of_tokens([], over).tolist() == []


def test_actions_that_nobody_saw_at_the_end_are_one_step():
    """The last two turns could not be read: they are a step that the world never answered."""
    unread = [*turns()[:1], policy_turn(token_ids=[7]), policy_turn(token_ids=[8, 9])]
    assert steps_of_tokens(unread, "action").tolist() == [0, 0, 1, 1, 1]


def test_where_steps_begin():
    assert first_of_steps(np.array([0, 0, 1, 2, 2, 2])).tolist() == [0, 2, 3]
    assert first_of_steps(np.array([1, 1, 4])).tolist() == [0, 2]


def test_turns_of_unequal_length_by_hand():
    """case T15: each token has its turn's advantage. gamma 1/2, lam 1, the reward 4 on the very last token.

    Values at the turns' first tokens: 0.5, 1, 2. Returns 1, 2, 4, so advantages 0.5, 1, 2.
    """
    values = np.array([0.5, 9.0, 1.0, 2.0, 9.0, 9.0])
    rewards = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 4.0])
    step = steps_of_tokens(turns(), "turn")
    found = gae_of_tokens(step, rewards, values, gamma=0.5, lam=1.0, truncated=False)
    assert found.tolist() == [0.5, 0.5, 1.0, 2.0, 2.0, 2.0]
    tokens = gae_of_tokens(np.arange(6), rewards, values, gamma=0.5, lam=1.0, truncated=False)
    assert tokens.tolist() == gae(rewards, values, gamma=0.5, lam=1.0, truncated=False).tolist()
