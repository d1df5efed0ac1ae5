"""Generalized advantage estimation over turns, action tokens or environment actions.

delta_k = r_k + gamma * V_(k+1) - V_k and A_k = sum over l of (gamma * lam)^l * delta_(k+l) (Schulman et al. 2016,
arXiv:1506.02438, equations 11 and 16). What a step is decides what gamma and lam mean: with tokens, thinking longer
takes longer; with turns it does not, and its cost must be a reward of its own. Observation tokens are no steps under
any of them: they do not come in here (cases T13, T14).

An episode that terminated has nothing after it. One that was truncated would have gone on, so the value of the state
after its last step stands for the rest: only truncation bootstraps.

Dimensions: K steps, N action tokens of one agent in an episode.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from headrace.platform.records.status import ActionKind
from headrace.platform.records.turn import Turn

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Unit = Literal["token", "turn", "action"]


def gae(rewards: F64, values: F64, *, gamma: float, lam: float, truncated: bool, next_value: float = 0.0) -> F64:
    """Advantages f64[K]; added to `values` they are the targets of the critic.

    Args:
        rewards: f64[K], earned by each step.
        values: f64[K], the critic's, of the state before each step.
        gamma: discount per step.
        lam: 0 believes the critic, 1 the rewards.
        truncated: whether the episode was cut off.
        next_value: the critic's, of the state after the last step. Without effect unless `truncated`.

    Raises:
        ValueError: when rewards and values differ in length.
    """
    if len(rewards) != len(values):
        raise ValueError(f"{len(rewards)} rewards and {len(values)} values; each step has one of both")
    advantages = np.zeros(len(rewards), np.float64)
    later_value, later = (next_value if truncated else 0.0), 0.0
    for k in range(len(rewards) - 1, -1, -1):
        delta = rewards[k] + gamma * later_value - values[k]
        later = advantages[k] = delta + gamma * lam * later
        later_value = float(values[k])
    return advantages


def steps_of_tokens(turns: Sequence[Turn], over: Unit) -> I64:
    """Which step each action token of `turns` is part of: i64[N], from 0, in the order of the tokens.

    token: each its own. turn: those of a turn. action: those of turns up to and with one that acted on the world, so
    that a turn the world never saw (it could not be read) is part of the action after it.

    Args:
        turns: one agent's policy turns, in order.
        over: what a step is.
    """
    lengths = [int(turn.action_mask.sum()) for turn in turns]
    if over == "token":
        return np.arange(sum(lengths), dtype=np.int64)
    numbers = np.arange(len(lengths), dtype=np.int64)
    if over == "action":
        acted = np.array([turn.action_kind is not ActionKind.NONE for turn in turns], np.int64)
        numbers = np.cumsum(acted) - acted
    return np.repeat(numbers, lengths)


def gae_of_tokens(
    step: I64, rewards: F64, values: F64, *, gamma: float, lam: float, truncated: bool, next_value: float = 0.0
) -> F64:
    """Advantages f64[N]: all tokens of a step have the step's (case T15).

    A step earns the rewards of all its tokens, and its value is that of its first one: the state in which it began.

    Args:
        step: i64[N], of `steps_of_tokens`.
        rewards: f64[N], on action tokens.
        values: f64[N], the critic's, of the state before each token.
        gamma: discount per step.
        lam: see `gae`.
        truncated: see `gae`.
        next_value: see `gae`.
    """
    first = first_of_steps(step)
    earned = np.zeros(len(first), np.float64)
    np.add.at(earned, step, rewards)
    advantages = gae(earned, values[first], gamma=gamma, lam=lam, truncated=truncated, next_value=next_value)
    return advantages[step]


def first_of_steps(step: I64) -> I64:
    """Where each step begins: i64[K] into i64[N]."""
    first: I64 = np.flatnonzero(np.diff(step, prepend=-1))
    return first
