"""Group-in-group policy optimization: episodes are compared, and so are actions taken in equal states.

A(a_t) = A_E + step_weight * A_S (Feng et al. 2025, arXiv:2505.10978, section 4). A_E is the episode's return relative
to its group. For A_S all turns of the group that began in the same state form a step group, wherever in their episodes
they stand, and each turn's discounted return G_t = sum over u >= t of gamma^(u - t) * r_u is relative to that step
group. Equal states are equal canonical hashes of what the world said before the turn. A turn whose world gives no hash,
or that is alone in its state, has A_S = 0. Standard deviations are unbiased, as in grpo.py. The loss is that of
surrogate.py.
"""

from collections import defaultdict
from collections.abc import Sequence

import msgspec
import numpy as np

from headrace.platform.config.algorithm import GigpoConfig
from headrace.platform.contracts import ScoredEpisode
from headrace.platform.records.episode import Episode
from headrace.trainer.algorithms.baselines import relative
from headrace.trainer.algorithms.comparable import check_comparable
from headrace.trainer.algorithms.surrogate import PolicyGradient
from headrace.trainer.credit import policy_turns
from headrace.trainer.returns import discounted, returns_by_turn, rewards_by_turn


class Gigpo(PolicyGradient[GigpoConfig]):
    """See the module. Stateless."""

    name = "gigpo"

    def __init__(self, config: GigpoConfig) -> None:
        super().__init__(config)
        self.needs = msgspec.structs.replace(self.needs, rewards=True)

    def advantages(self, group: Sequence[ScoredEpisode]) -> list[list[float]]:
        """For each episode one advantage per policy turn.

        Raises:
            ValueError: for fewer than two episodes, members that cannot be compared, or a reward that is not valid.
        """
        check_comparable(group, 2, "GiGPO")
        scores = np.array([returns_by_turn(member, self._config.returns)[0] for member in group], np.float64)
        compared = relative(scores, self._config.scale, self._config.epsilon)
        credit = [[float(a)] * len(policy_turns(m.episode)) for a, m in zip(compared, group, strict=True)]
        rewards = [rewards_by_turn(member, self._config.returns) for member in group]
        returns = [discounted(one, self._config.step_gamma) for one in rewards]
        for places in step_groups([member.episode for member in group]):
            found = np.array([returns[i][t] for i, t in places], np.float64)
            among = relative(found, self._config.scale, self._config.epsilon)
            for (i, t), advantage in zip(places, among, strict=True):
                credit[i][t] += self._config.step_weight * float(advantage)
        return credit


def step_groups(episodes: Sequence[Episode]) -> list[list[tuple[int, int]]]:
    """Turns that began in the same state, two or more each: (episode, policy turn), both counted from 0."""
    places: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for number, episode in enumerate(episodes):
        for t, index in enumerate(policy_turns(episode)):
            state = episode.turns[index - 1].state_hash.canonical if index else ""
            if state:
                places[state].append((number, t))
    return [found for found in places.values() if len(found) > 1]
