"""Proximal policy optimization: a critic is the baseline, and generalized advantage estimation the credit.

    loss = policy loss + coefficient * value loss

(Schulman et al. 2017, arXiv:1707.06347, equations 7 and 9). The policy loss is that of surrogate.py, the value loss
that of value_loss.py, which the backend's critic adds. Advantages are those of gae.py, from values by the weights at
the start of the batch.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from headrace.platform.config.algorithm import PpoConfig
from headrace.platform.contracts import ScoredEpisode
from headrace.trainer.algorithms.comparable import check_comparable
from headrace.trainer.algorithms.gae import gae
from headrace.trainer.algorithms.paths import by_time, onto_tokens, paths_of, spread
from headrace.trainer.algorithms.surrogate import PolicyGradient
from headrace.trainer.credit import policy_turns
from headrace.trainer.crediting import Credited, Valued
from headrace.trainer.returns import rewards_by_turn


class Ppo(PolicyGradient[PpoConfig]):
    """See the module. Stateless: the critic is the backend's."""

    name = "ppo"

    def __init__(self, config: PpoConfig) -> None:
        super().__init__(config)
        self.needs = msgspec.structs.replace(self.needs, rewards=True, values=True)

    def advantages(self, group: Sequence[ScoredEpisode]) -> list[list[float]]:
        """For each episode one advantage per policy turn, as if every value were 0: until `credit` knows better.

        Raises:
            ValueError: for members that did not play the same task and seeds, or a reward that is not valid.
        """
        check_comparable(group, 1, "PPO")
        options, found = self._config.gae, []
        for member in group:
            rewards = rewards_by_turn(member, by_time(self._config.returns, options))
            by_turn = gae(rewards, np.zeros_like(rewards), gamma=options.gamma, lam=options.lam, truncated=False)
            found.append(by_turn[: len(policy_turns(member.episode))].tolist())
        return found

    def credit(self, batch: Sequence[Valued]) -> list[Credited]:
        """Advantages and the critic's targets of a batch, from values by the weights at its start.

        Raises:
            ValueError: a reward that is not valid.
        """
        paths = [paths_of(one, self._config.gae, self._config.returns) for one in batch]
        mean, deviation = 0.0, 1.0
        if self._config.normalize:
            mean, deviation = spread([path for own in paths for path in own])
        return [onto_tokens(one, own, mean, deviation) for one, own in zip(batch, paths, strict=True)]
