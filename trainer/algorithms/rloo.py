"""REINFORCE leave-one-out: a member's baseline is the mean of the others.

A_i = R_i - 1/(n - 1) * sum over j != i of R_j (Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free!";
Ahmadian et al. 2024, arXiv:2402.14740, equation 8). No own score is in the baseline, so nothing is biased, and nothing
is divided. With process rewards and `returns.credit: to_go` the comparison is turn by turn. The loss is that of
surrogate.py.
"""

from collections.abc import Sequence

from headrace.platform.config.algorithm import RlooConfig
from headrace.platform.contracts import ScoredEpisode
from headrace.trainer.algorithms.baselines import over_others
from headrace.trainer.algorithms.comparable import check_comparable
from headrace.trainer.algorithms.surrogate import PolicyGradient
from headrace.trainer.credit import policy_turns
from headrace.trainer.returns import returns_by_turn


class Rloo(PolicyGradient[RlooConfig]):
    """See the module. Stateless."""

    name = "rloo"

    def advantages(self, group: Sequence[ScoredEpisode]) -> list[list[float]]:
        """For each episode one advantage per policy turn.

        Raises:
            ValueError: for fewer than two episodes, members that cannot be compared, or a return that asks for reward
                rows which are not there.
        """
        check_comparable(group, 2, "RLOO")
        compared = over_others([returns_by_turn(member, self._config.returns) for member in group])
        return [a[: len(policy_turns(m.episode))].tolist() for a, m in zip(compared, group, strict=True)]
