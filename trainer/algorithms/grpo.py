"""Group-relative policy optimization: the group's other members are the baseline.

Sources: advantages are those of DeepSeekMath (Shao et al. 2024, arXiv:2402.03300, section 4.1.2, outcome supervision):
A_i = (r_i - mean(r)) / std(r). The paper does not say which std; here it is the unbiased one (divisor n - 1), as in
torch.std and TRL. The loss is the clipped surrogate of PPO (Schulman et al. 2017, arXiv:1707.06347, equation 7) with
two clip bounds and a mean over tokens, as in DAPO (Yu et al. 2025, arXiv:2503.14476, equation 8). The reported KL is
the k3 estimator of Schulman ("Approximating KL divergence", 2020): r - 1 - log r with r = learner / behaviour.

Dimension: N, the loss tokens of a microbatch.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.platform.config.learner import GrpoConfig
from headrace.platform.contracts import ScoredEpisode
from headrace.trainer.batch import LossOutput, LossTokens
from headrace.trainer.credit import policy_turns

MAX_LOG_RATIO = 20.0
"""Keeps exp() finite in fp32; far outside every clip range."""


class Grpo:
    """See the module. Stateless."""

    name = "grpo"
    needs_variance = True

    def __init__(self, config: GrpoConfig) -> None:
        self._config = config

    def advantages(self, group: Sequence[ScoredEpisode]) -> list[list[float]]:
        """For each episode one advantage per policy turn: the same for all turns of an episode.

        Raises:
            ValueError: for fewer than two episodes, or members that did not play the same task and seeds: their
                scores cannot be compared.
        """
        if len(group) < 2:
            raise ValueError(f"a group of {len(group)} has no baseline; GRPO needs at least two episodes")
        _check_comparable(group)
        scores = np.array([member.score for member in group], np.float64)
        relative = (scores - scores.mean()) / (scores.std(ddof=1) + self._config.epsilon)
        return [[float(a)] * len(policy_turns(m.episode)) for a, m in zip(relative, group, strict=True)]

    def loss(self, logprobs: Tensor, batch: LossTokens) -> LossOutput:
        """The clipped surrogate, this microbatch's share of the mean over the step's loss tokens.

        Args:
            logprobs: learner logprobs f32[N] of the loss tokens, at the sampling temperature.
            batch: the same tokens.
        """
        low, high = 1.0 - self._config.clip_low, 1.0 + self._config.clip_high
        advantages_N = batch.advantages
        log_ratio_N = (logprobs - batch.behaviour_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio_N = log_ratio_N.exp()
        surrogate_N = torch.minimum(ratio_N * advantages_N, ratio_N.clamp(low, high) * advantages_N)
        with torch.no_grad():
            clipped_N = ((advantages_N > 0) & (ratio_N > high)) | ((advantages_N < 0) & (ratio_N < low))
            kl_N = ratio_N - 1.0 - log_ratio_N
        return LossOutput(
            loss=-surrogate_N.sum() / batch.step_tokens, ratio=ratio_N.detach(), clipped=clipped_N, kl=kl_N
        )


def _check_comparable(group: Sequence[ScoredEpisode]) -> None:
    def played(member: ScoredEpisode) -> tuple[str, str, str, str, int, int]:
        episode = member.episode
        task = episode.task
        return (episode.environment, episode.environment_version, task.task_id, task.version, task.seed, episode.seed)

    first = played(group[0])
    for member in group[1:]:
        if played(member) != first:
            raise ValueError(
                f"{member.episode.episode_id} played {played(member)} and {group[0].episode.episode_id} {first}"
                " (environment, version, task, task version, task seed, environment seed): the members of a group"
                " must be equal in all of these"
            )
