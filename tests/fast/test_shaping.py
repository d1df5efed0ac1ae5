"""Potential-based shaping: the best policy of a small world stays the best, and does not without the terminal term."""

import numpy as np
import pytest

from headrace.trainer.returns import discounted
from headrace.trainer.shaping import shaping_rewards

GAMMA = 0.9
GOAL, PIT = 3, 4
TERMINAL = (GOAL, PIT)
# state: {action: (next state, reward)}. From 0 a longer way (1, 2) leads to the goal, a short one into the pit.
WORLD = {
    0: {"on": (1, 0.0), "fall": (PIT, 0.5)},
    1: {"on": (2, 0.0), "back": (0, 0.0)},
    2: {"on": (GOAL, 1.0), "fall": (PIT, 0.2)},
}
POTENTIALS = np.array([-1.0, 2.0, 0.5, 1.0, 30.0])


def best_policy(shape) -> dict[int, str]:
    """Value iteration over rewards r + shape(s, s')."""
    values = np.zeros(len(POTENTIALS))

    def q(state, action):
        after, reward = WORLD[state][action]
        return reward + shape(state, after) + GAMMA * (0.0 if after in TERMINAL else values[after])

    for _ in range(500):
        for state, actions in WORLD.items():
            values[state] = max(q(state, action) for action in actions)
    return {state: max(actions, key=lambda a: q(state, a)) for state, actions in WORLD.items()}


def shaped(state: int, after: int) -> float:
    pair = POTENTIALS[[state, after]]
    return float(shaping_rewards(pair, GAMMA, goes_on=after not in TERMINAL)[0])


def without_terminal_term(state: int, after: int) -> float:
    return float(GAMMA * POTENTIALS[after] - POTENTIALS[state])


def test_the_best_policy_does_not_move():
    """0.9^2 = 0.81 for the goal beats 0.5 for the pit."""
    plain = best_policy(lambda state, after: 0.0)
    assert plain == {0: "on", 1: "on", 2: "on"}
    assert best_policy(shaped) == plain


def test_it_moves_when_the_terminal_term_is_left_out():
    """The pit's potential of 30 is then a prize."""
    assert best_policy(without_terminal_term)[0] == "fall"


def test_shaping_by_hand():
    """Potentials 1 2 4, gamma 1/2: 1 - 1, 2 - 2; at a terminal end 0 - 2."""
    potentials = np.array([1.0, 2.0, 4.0])
    assert shaping_rewards(potentials, 0.5, goes_on=True).tolist() == [0.0, 0.0]
    assert shaping_rewards(potentials, 0.5).tolist() == [0.0, -2.0]
    assert potentials.tolist() == [1.0, 2.0, 4.0]


@pytest.mark.parametrize("goes_on", [True, False])
def test_the_sum_is_that_of_the_ends(goes_on):
    """The discounted sum over an episode is gamma^K * (last, 0 if terminal) - first, whatever came between."""
    potentials = np.random.default_rng(0).normal(size=7)
    total = discounted(shaping_rewards(potentials, GAMMA, goes_on=goes_on), GAMMA)[0]
    last = GAMMA**6 * potentials[-1] if goes_on else 0.0
    assert total == pytest.approx(last - potentials[0])


def test_one_potential_is_no_step():
    with pytest.raises(ValueError, match="no step"):
        shaping_rewards(np.array([1.0]), GAMMA)
