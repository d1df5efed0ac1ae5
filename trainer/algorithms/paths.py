"""Time in an episode: the steps that one agent took, with values, rewards and advantages, and back to tokens.

Time runs over the policy's turns of one agent, through all its contexts; each context gives the values of the states
that were reached in it. A turn's state is where its first action token is about to be sampled. All that an episode
earned counts for each of its agents, on the last of their turns until then. Tokens that leave the loss are time all the
same.

Dimensions: K steps, N action tokens of one agent in an episode, T tokens of a sample.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headrace.platform.config.algorithm import GaeConfig, ReturnsConfig
from headrace.platform.records.episode import Episode
from headrace.platform.records.status import StopReason
from headrace.trainer.algorithms.gae import F64, I64, first_of_steps, gae_of_tokens, steps_of_tokens
from headrace.trainer.credit import policy_turns
from headrace.trainer.crediting import Credited, Valued
from headrace.trainer.returns import rewards_by_turn
from headrace.trainer.samples import CriticColumns, OwnTurn

_LEAST_DEVIATION = 1e-5
"""As a share of the largest advantage, or of 1: less is rounding, which nothing is divided by."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Path:
    """One agent's action tokens in the order of sampling. i64[N]: `turn` by index, the `sample` that each lies in and
    its `place` there, `step` of time. f64[N]: `values` of the states before, `advantages`. bool[N]: whether it is
    `trained` on."""

    turn: I64
    sample: I64
    place: I64
    step: I64
    values: F64
    advantages: F64
    trained: npt.NDArray[np.bool_]


def paths_of(one: Valued, options: GaeConfig, returns: ReturnsConfig) -> list[Path]:
    """The paths of an episode's agents.

    Raises:
        ValueError: see `rewards_by_turn`.
    """
    agents = defaultdict[str, list[tuple[OwnTurn, int]]](list)
    for number, sample in enumerate(one.samples):
        agents[sample.agent_id] += [(own, number) for own in sample.turns]
    return [_path(one, sorted(own, key=lambda each: each[0].turn), options, returns) for own in agents.values() if own]


def _path(one: Valued, own: Sequence[tuple[OwnTurn, int]], options: GaeConfig, returns: ReturnsConfig) -> Path:
    """`own` are one agent's turns and the samples that they lie in."""
    episode = one.scored.episode
    places = [t.start + np.flatnonzero(one.samples[s].action_mask[t.start : t.end]) for t, s in own]
    lengths = [len(each) for each in places]
    before = [np.concatenate([np.zeros(1), values[:-1]]) for values in one.values]
    values = np.concatenate([before[s][at] for at, (_, s) in zip(places, own, strict=True)])
    rewards = np.zeros(len(values), np.float64)
    goes_on = _goes_on(episode, options)
    earned = rewards_by_turn(one.scored, by_time(returns, options), [t.turn for t, _ in own], goes_on)
    rewards[np.cumsum(lengths) - 1] = earned
    step = steps_of_tokens([episode.turns[t.turn] for t, _ in own], options.over)
    advantages = gae_of_tokens(
        step,
        rewards,
        values,
        gamma=options.gamma,
        lam=options.lam,
        truncated=goes_on,
        next_value=float(one.values[own[-1][1]][-1]),
    )
    trained = [one.samples[s].loss_mask[at] == 1 for at, (_, s) in zip(places, own, strict=True)]
    return Path(
        turn=np.repeat([t.turn for t, _ in own], lengths),
        sample=np.repeat([s for _, s in own], lengths),
        place=np.concatenate(places),
        step=step,
        values=values,
        advantages=advantages,
        trained=np.concatenate(trained),
    )


def by_time(returns: ReturnsConfig, options: GaeConfig) -> ReturnsConfig:
    """The weights of rewards, with the discount that time has here: shaping must use the same."""
    return returns.model_copy(update={"gamma": options.gamma}) if returns.shaping else returns


def _goes_on(episode: Episode, options: GaeConfig) -> bool:
    """Whether the value of its last state stands for what an episode would still have earned (P27)."""
    return episode.truncated and (options.bootstrap == "always" or episode.stop_reason is StopReason.ENV_TRUNCATED)


def spread(paths: Sequence[Path]) -> tuple[float, float]:
    """Mean and standard deviation (divisor K) of the advantages of all steps that are trained on; 0 and 1 of fewer than
    two, and 1 for a deviation that is none."""
    found = [path.advantages[path.trained][first_of_steps(path.step[path.trained])] for path in paths]
    steps = np.concatenate([np.zeros(0), *found])
    if steps.size < 2:
        return 0.0, 1.0
    deviation = float(steps.std())
    return float(steps.mean()), deviation if deviation > _LEAST_DEVIATION * max(1.0, np.abs(steps).max()) else 1.0


def onto_tokens(one: Valued, paths: Sequence[Path], mean: float, deviation: float) -> Credited:
    """Advantages less `mean` over `deviation`, on tokens and per policy turn, and the critic's columns.

    The critic is trained on the states in which steps begin, with plain advantages plus values as targets. A turn's
    advantage is the mean over its action tokens: all are equal unless time is in tokens. Turns without own tokens
    have 0.
    """
    advantages = [np.zeros(sample.length, np.float32) for sample in one.samples]
    critic = [_no_columns(sample.length) for sample in one.samples]
    by_turn = dict.fromkeys(policy_turns(one.scored.episode), 0.0)
    for path in paths:
        relative = (path.advantages - mean) / deviation
        begins = np.zeros(len(path.step), np.bool_)
        begins[first_of_steps(path.step)] = True
        for s in np.unique(path.sample):
            here = path.sample == s
            at = path.place[here]
            advantages[s][at] = relative[here]
            critic[s].values[at] = path.values[here]
            critic[s].targets[at] = (path.values + path.advantages)[here]
            critic[s].mask[at] = (begins & path.trained)[here]
        for turn in np.unique(path.turn):
            by_turn[int(turn)] = float(relative[path.turn == turn].mean())
    samples = [
        dataclasses.replace(sample, advantages=given, critic=columns)
        for sample, given, columns in zip(one.samples, advantages, critic, strict=True)
    ]
    return Credited(advantages=tuple(by_turn.values()), samples=tuple(samples))


def _no_columns(length: int) -> CriticColumns:
    return CriticColumns(
        values=np.zeros(length, np.float32), targets=np.zeros(length, np.float32), mask=np.zeros(length, np.uint8)
    )
