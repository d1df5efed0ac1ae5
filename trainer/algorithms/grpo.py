"""Group-relative policy optimization: the group's other members are the baseline.

Sources: advantages are those of DeepSeekMath (Shao et al. 2024, arXiv:2402.03300, section 4.1.2, outcome supervision):
A_i = (r_i - mean(r)) / std(r). The paper does not say which std; here it is the unbiased one (divisor n - 1), as in
torch.std and TRL. `scale: none` leaves the division out, as Dr. GRPO does (Liu et al. 2025, arXiv:2503.20783), whose
loss is `aggregation: fixed`. The loss is that of surrogate.py.
"""

from collections.abc import Sequence

import numpy as np

from headrace.platform.config.algorithm import GrpoConfig
from headrace.platform.contracts import ScoredEpisode
from headrace.trainer.algorithms.baselines import relative
from headrace.trainer.algorithms.comparable import check_comparable
from headrace.trainer.algorithms.surrogate import PolicyGradient
from headrace.trainer.credit import policy_turns
from headrace.trainer.returns import returns_by_turn


class Grpo(PolicyGradient[GrpoConfig]):
    """See the module. Stateless."""

    name = "grpo"

    def advantages(self, group: Sequence[ScoredEpisode]) -> list[list[float]]:
        """For each episode one advantage per policy turn: the same for all turns of an episode.

        Raises:
            ValueError: for fewer than two episodes, or members that did not play the same task and seeds: their
                scores cannot be compared; or a return that asks for reward rows which are not there.
        """
        check_comparable(group, 2, "GRPO")
        scores = np.array([returns_by_turn(member, self._config.returns)[0] for member in group], np.float64)
        compared = relative(scores, self._config.scale, self._config.epsilon)
        return [[float(a)] * len(policy_turns(m.episode)) for a, m in zip(compared, group, strict=True)]
