"""What the turns of an episode earn: reward rows to returns, their terms kept apart.

G_t = task + cost_weight * cost + safety_weight * safety + sum over u >= t of gamma^(u - t) * process_u. Task is outcome
and format; with shaping, process holds the differences of potentials too (shaping.py). Costs and safety have the sign
of rewards, so what is bad is negative and weights of 1 give the plain sum, the episode's score. Only process rewards
are credited turn by turn, and only they are discounted: the rest is about the episode as a whole.

Time is counted in turns (or, in `token_returns`, in action tokens). Observation tokens are no time steps: they neither
discount nor end anything (cases T13, T14). Dimensions: K policy turns, at least 1 (an episode without any is counted as
one turn that nobody took); L tokens of a turn.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.platform.config.algorithm import ReturnsConfig
from headrace.platform.contracts import ScoredEpisode
from headrace.platform.records.arrays import F32, U8
from headrace.platform.records.episode import Episode
from headrace.platform.records.status import RewardKind
from headrace.platform.records.tables import RewardRow
from headrace.trainer.credit import policy_turns
from headrace.trainer.shaping import shaping_rewards

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReturnTerms:
    """The terms of one episode's return, before weights: sums of their rows. `process` is f64[K]. `potentials`
    f64[K + 1] are of the states before each turn and after the last; None where they were not asked for."""

    task: float
    cost: float
    safety: float
    process: F64
    potentials: F64 | None = None

    def by_turn(self, config: ReturnsConfig) -> F64:
        """G_t f64[K]; with credit "episode" every turn has that of the first."""
        whole = self.task + config.cost * self.cost + config.safety * self.safety
        shaped = 0.0 if self.potentials is None else shaping_rewards(self.potentials, config.gamma)
        to_go = whole + discounted(self.process + shaped, config.gamma)
        return to_go if config.credit == "to_go" else np.full_like(to_go, to_go[0])


def discounted(rewards: F64, gamma: float) -> F64:
    """sum over u >= t of gamma^(u - t) * rewards[u], f64[K], from rewards f64[K]."""
    returns = np.zeros(len(rewards), np.float64)
    later = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        later = returns[t] = rewards[t] + gamma * later
    return returns


def token_returns(action_mask: U8, rewards: F32, gamma: float) -> F64:
    """Returns with time in action tokens: f64[L], 0 where the mask is 0 (case T13).

    Args:
        action_mask: u8[L], 1 where the policy sampled the token.
        rewards: f32[L], already on actions (`credit.place_rewards`).
        gamma: discount per action token.
    """
    actions = np.flatnonzero(action_mask)
    returns = np.zeros(len(action_mask), np.float64)
    returns[actions] = discounted(rewards[actions].astype(np.float64), gamma)
    return returns


def return_terms(episode: Episode, rows: Sequence[RewardRow], shaping: bool = False) -> ReturnTerms:
    """The terms that the reward rows of `episode` add up to; rows that another one supersedes are not among them.

    A process reward of a turn that is not the policy's belongs to the policy's turn before it, one without a turn to
    the last one: only an action can have earned it (case T12).

    Raises:
        ValueError: for a row that is not valid: failure is never a reward.
    """
    turns = policy_turns(episode)
    process = np.zeros(max(len(turns), 1), np.float64)
    sums = dict.fromkeys(RewardKind, 0.0)
    for row in rows:
        if row.kind is RewardKind.PROCESS:
            process[_place(turns, row)] += _value(row)
        elif row.kind.is_reward:
            sums[row.kind] += _value(row)
    return ReturnTerms(
        task=sums[RewardKind.OUTCOME] + sums[RewardKind.FORMAT],
        cost=sums[RewardKind.COST],
        safety=sums[RewardKind.SAFETY],
        process=process,
        potentials=_potentials(turns, rows) if shaping else None,
    )


def returns_by_turn(member: ScoredEpisode, config: ReturnsConfig) -> F64:
    """G_t f64[K]. Where no terms are asked for, it is the score at every turn.

    Raises:
        ValueError: when terms are asked for and the member has no reward rows, or one is not valid.
    """
    if config.plain:
        return np.full(max(len(policy_turns(member.episode)), 1), member.score, np.float64)
    return return_terms(member.episode, _rows(member), config.shaping).by_turn(config)


def rewards_by_turn(
    member: ScoredEpisode, config: ReturnsConfig, turns: Sequence[int] | None = None, goes_on: bool = False
) -> F64:
    """Every reward of the member, weighted, where it was earned: f64[K], those without a turn on the last one.

    A member that came with its score alone has all of it on the last turn. Raises ValueError as `returns_by_turn`.

    Args:
        member: the episode and its rewards.
        config: the weights of costs and safeties, and the discount of shaping.
        turns: the K turns that may earn, by index; all of the policy's by default. With those of one agent, what the
            others earn is its reward too.
        goes_on: whether whoever uses them adds the value of the last state, which is no end then.
    """
    turns = policy_turns(member.episode) if turns is None else turns
    rewards = np.zeros(max(len(turns), 1), np.float64)
    if config.plain and not member.rewards:
        rewards[-1] = member.score
        return rewards
    weights = {RewardKind.COST: config.cost, RewardKind.SAFETY: config.safety}
    rows = _rows(member)
    for row in rows:
        if row.kind.is_reward:
            rewards[_place(turns, row)] += weights.get(row.kind, 1.0) * _value(row)
    if config.shaping:
        rewards += shaping_rewards(_potentials(turns, rows), config.gamma, goes_on=goes_on)
    return rewards


def _rows(member: ScoredEpisode) -> tuple[RewardRow, ...]:
    if not member.rewards:
        raise ValueError(f"{member.episode.episode_id} came with its score alone; returns by term need its reward rows")
    return member.rewards


def _value(row: RewardRow) -> float:
    if row.value is None:
        raise ValueError(f"a {row.kind} reward of {row.episode_id} is not valid, so there is no return")
    return row.value


def _potentials(turns: Sequence[int], rows: Sequence[RewardRow]) -> F64:
    """Potentials f64[K + 1] of the states before each turn and after the last: the rows of a turn added up; of several
    turns before the policy's next one, such as other agents', the last one's.

    A turn without any left the world where it was; the first state has 0 unless a row before the first turn says
    otherwise. Raises ValueError for one that is not valid.
    """
    sums: dict[float, float] = defaultdict(float)
    for row in rows:
        if row.kind is RewardKind.POTENTIAL:
            sums[np.inf if row.turn is None else row.turn] += _value(row)
    stated = np.full(max(len(turns), 1) + 1, np.nan)
    stated[0] = 0.0
    for turn, potential in sorted(sums.items()):
        stated[int(np.searchsorted(turns, turn, side="right"))] = potential
    for k in np.flatnonzero(np.isnan(stated)):
        stated[k] = stated[k - 1]
    return stated


def _place(turns: Sequence[int], row: RewardRow) -> int:
    """The policy turn, counted from 0, that earned the row."""
    if row.turn is None or not turns:
        return -1
    return max(int(np.searchsorted(turns, row.turn, side="right")) - 1, 0)
