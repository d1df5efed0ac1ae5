"""The critic's loss: squared error, with PPO's clip around the values that the advantages were made with.

L = 1/2 * max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2), as in the code of PPO (Schulman et al. 2017,
arXiv:1707.06347; the clip is not in the paper: Huang et al. 2022, "The 37 implementation details of proximal policy
optimization", detail 9). V_old are values by the weights at the start of the batch, R is advantage plus V_old. A value
that has moved by more than c towards R has no gradient.

The mean is over the states of the whole optimizer step in which a step of time begins and whose first token is in the
loss, so that microbatches add up to it (case V6). Dimensions: N loss tokens of a microbatch, K states among them.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.trainer.batch import LossTokens
from headrace.trainer.samples import CriticColumns, Sample


def step_values(samples: Sequence[Sample]) -> int:
    """States of an optimizer step that the critic is trained on: the denominator of its mean."""
    return sum(int(sample.critic.mask.sum()) for sample in samples if sample.critic is not None)


def value_loss(values: Tensor, tokens: LossTokens, step_values: int, clip: float) -> Tensor:
    """This microbatch's share of the step's value loss, a scalar.

    Args:
        values: f32[N], the critic's, of the states before the loss tokens, with gradient.
        tokens: the same tokens.
        step_values: see `step_values`.
        clip: how far a value may move before its gradient ends, in units of reward.

    Raises:
        ValueError: the samples were not credited by value.
    """
    columns = [_columns(row) for row in tokens.rows]
    starts = np.cumsum([0, *(len(one.mask) for one in columns)])[:-1]
    place_N = starts[tokens.row.cpu().numpy()] + tokens.column.cpu().numpy()
    begins_N = np.concatenate([one.mask for one in columns])[place_N] == 1
    old_K, targets_K = (
        torch.from_numpy(np.concatenate(each)[place_N[begins_N]]).to(values.device)
        for each in ([one.values for one in columns], [one.targets for one in columns])
    )
    chosen_K = values[torch.from_numpy(begins_N).to(values.device)]
    return clipped_value_loss(chosen_K, old_K, targets_K, clip).sum() / max(step_values, 1)


def clipped_value_loss(values: Tensor, old_values: Tensor, targets: Tensor, clip: float) -> Tensor:
    """One term f32[K] for each state.

    Args:
        values: f32[K], with gradient.
        old_values: f32[K], of the same critic when the advantages were computed.
        targets: f32[K], advantages plus old values.
        clip: see `value_loss`.
    """
    near = old_values + (values - old_values).clamp(-clip, clip)
    return torch.maximum((values - targets).square(), (near - targets).square()) / 2


def _columns(sample: Sample) -> CriticColumns:
    if sample.critic is None:
        raise ValueError(f"{sample.episode_id} was not credited by value, and the critic has nothing to learn from it")
    return sample.critic
