"""Continuations from the steps of an episode say what these steps were worth.

The value of a state is estimated by playing on from it: V(s) = mean return of K continuations (VinePPO, Kazemnejad et
al. 2024, arXiv:2410.01679, equation 8), and an action is worth by how much it raises that value (equation 3 there,
over the turns from one point to the next). With the points p_1 < … < p_m of an episode e of return R_e,

    A(turns from p_j to p_j+1) = V(p_j+1) - V(p_j)        A(turns from p_m on) = R_e - V(p_m)

Returns are whole episodes', so that what was earned before a point is on both sides and cancels. Every member begins
at a point: the reset, or a step of the member that it branches off. There, V is the mean of the *other* members that
passed through that state by sampling from it, for no own return may be in a baseline: a continuation's turns have
R_i less the mean of its siblings and of the trunk, the trunk's V are the continuations' alone. Turns that were taken
over from the trunk have 0, and the loss never sees them (samples.py). Where nobody is left to say what a state is
worth, its point is none; turns before the first point that is left have 0. With one point this is RLOO.

The loss is that of surrogate.py. Dimension: n members of a group.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from headrace.platform.config.branch import BranchConfig
from headrace.platform.contracts import ScoredEpisode
from headrace.platform.records.episode import Episode
from headrace.platform.records.status import Role
from headrace.trainer.algorithms.comparable import check_comparable
from headrace.trainer.algorithms.surrogate import PolicyGradient
from headrace.trainer.credit import policy_turns
from headrace.trainer.returns import returns_by_turn

Place = tuple[str, int]
"""A state: the episode that it is of, and the step. The reset is one state for the whole group."""

_RESET: Place = ("", 0)


class Branch(PolicyGradient[BranchConfig]):
    """See the module. Stateless."""

    name = "branch"

    def advantages(self, group: Sequence[ScoredEpisode]) -> list[list[float]]:
        """For each episode one advantage per policy turn.

        Raises:
            ValueError: for fewer than two episodes, members that cannot be compared, or a return that asks for reward
                rows which are not there.
        """
        check_comparable(group, 2, "branch")
        returns = [float(returns_by_turn(member, self._config.returns)[0]) for member in group]
        begun = defaultdict[Place, list[int]](list)
        for i, member in enumerate(group):
            begun[beginning(member.episode)].append(i)
        numbers = {member.episode.episode_id: i for i, member in enumerate(group)}
        credit = []
        for i, member in enumerate(group):
            own = beginning(member.episode)
            others = {*begun[own], *([numbers[own[0]]] if own[0] in numbers else [])} - {i}
            values = {own[1]: _mean(returns, sorted(others))} if others else {}
            values |= {
                step: _mean(returns, found)
                for (parent, step), found in begun.items()
                if parent == member.episode.episode_id
            }
            credit.append(_by_turn(member.episode, own[1], returns[i], values))
        return credit


def beginning(episode: Episode) -> Place:
    """The state from which the episode was sampled."""
    return (episode.parent_episode, episode.branch_step) if episode.branch_step else _RESET


def _by_turn(episode: Episode, begins: int, earned: float, values: dict[int, float]) -> list[float]:
    """One advantage per policy turn, from the values of the states that are points, by step."""
    points = sorted(values)
    after = {p: values[q] for p, q in pairwise(points)}
    sampled = [index for index, turn in enumerate(episode.turns) if turn.role is Role.ASSISTANT]
    steps = {index: step for step, index in enumerate(sampled)}
    credit = []
    for index in policy_turns(episode):
        step = steps[index]
        point = max((p for p in points if p <= step), default=None)
        credit.append(0.0 if point is None or step < begins else after.get(point, earned) - values[point])
    return credit


def _mean(returns: Sequence[float], members: Sequence[int]) -> float:
    return sum(returns[i] for i in members) / len(members)
