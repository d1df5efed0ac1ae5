"""REINFORCE: the return of a turn less a baseline is its advantage.

grad J = E[sum over t of grad log pi(a_t | h_t) * (G_t - b)] (Williams 1992, "Simple statistical gradient-following
algorithms", equation 11). The baseline b is the group's mean at that turn, an exponential mean over the batches before
(the reinforcement comparison of Sutton 1984), or 0. The loss is that of surrogate.py.

The running mean is state. `advantages` reads it and never changes it, so that a group which is opened twice counts
once; `observe` changes it, once for each batch that was trained. `state` and `restore` belong into the checkpoint.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from headrace.platform.config.algorithm import ReinforceConfig
from headrace.platform.contracts import ScoredEpisode
from headrace.trainer.algorithms.baselines import over_mean
from headrace.trainer.algorithms.comparable import check_comparable
from headrace.trainer.algorithms.surrogate import PolicyGradient
from headrace.trainer.credit import policy_turns
from headrace.trainer.returns import returns_by_turn


class Reinforce(PolicyGradient[ReinforceConfig]):
    """See the module. The running mean is 0 until a batch was observed."""

    name = "reinforce"

    def __init__(self, config: ReinforceConfig) -> None:
        super().__init__(config)
        self._mean = 0.0
        self._batches = 0

    def advantages(self, group: Sequence[ScoredEpisode]) -> list[list[float]]:
        """For each episode one advantage per policy turn.

        Raises:
            ValueError: for a group of one that is its own baseline, members that cannot be compared, or a return that
                asks for reward rows which are not there.
        """
        check_comparable(group, 2 if self._config.baseline == "group" else 1, "REINFORCE with the group's mean")
        returns = [returns_by_turn(member, self._config.returns) for member in group]
        if self._config.baseline == "group":
            compared = over_mean(returns)
        else:
            baseline = self._mean if self._config.baseline == "running" else 0.0
            compared = [one - baseline for one in returns]
        return [a[: len(policy_turns(m.episode))].tolist() for a, m in zip(compared, group, strict=True)]

    def observe(self, batch: Sequence[Sequence[ScoredEpisode]]) -> None:
        """Move the running mean by the groups of a batch that was just trained; every episode counts alike."""
        returns = [returns_by_turn(member, self._config.returns)[0] for group in batch for member in group]
        if not returns:
            return
        keep = self._config.decay if self._batches else 0.0
        self._mean = keep * self._mean + (1.0 - keep) * float(np.mean(returns))
        self._batches += 1

    def state(self) -> dict[str, float]:
        """What a resume needs: the running mean, in units of reward, and over how many batches it runs."""
        return {"mean": self._mean, "batches": float(self._batches)}

    def restore(self, state: Mapping[str, float]) -> None:
        """Take up what `state` returned; a run that had another algorithm until now has no running mean."""
        self._mean, self._batches = state.get("mean", 0.0), int(state.get("batches", 0))
