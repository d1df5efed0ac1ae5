"""Where rewards and advantages sit on the tokens of a turn.

Owns two rules that every algorithm shares. An advantage belongs to a turn and goes to each of its action tokens
(case T15). A reward belongs to a token; where that token is not the policy's, it counts as if it were on the turn's
last action (case T12), because only an action can have earned it. What the numbers are is the algorithm's business.
"""

import numpy as np

from headrace.platform.records.arrays import F32, U8
from headrace.platform.records.episode import Episode


def policy_turns(episode: Episode) -> list[int]:
    """Indices of the turns in which the policy sampled at least one token, in order."""
    return [index for index, turn in enumerate(episode.turns) if turn.is_action]


def place_rewards(action_mask: U8, rewards: F32) -> F32:
    """Move the rewards of one policy turn onto its actions.

    Args:
        action_mask: u8[L], 1 where the policy sampled the token; at least one is 1.
        rewards: f32[L], the reward on each token of the turn.

    Returns:
        f32[L], 0 wherever the mask is 0; the sum is that of `rewards`.

    Raises:
        ValueError: when the turn has no action that a reward could belong to.
    """
    actions = np.flatnonzero(action_mask)
    if actions.size == 0:
        raise ValueError("this turn has no action token, so no reward can belong to it")
    is_action = action_mask.astype(bool)
    placed = np.where(is_action, rewards, np.float32(0))
    placed[actions[-1]] += np.where(is_action, np.float32(0), rewards).sum()
    return placed


def turn_advantages(episode: Episode, advantages: list[float]) -> dict[int, float]:
    """The advantage of each policy turn, by turn index.

    Raises:
        ValueError: when there is not exactly one advantage per policy turn.
    """
    turns = policy_turns(episode)
    if len(turns) != len(advantages):
        raise ValueError(
            f"episode {episode.episode_id} has {len(turns)} policy turns and was given {len(advantages)} advantages"
        )
    return dict(zip(turns, advantages, strict=True))
