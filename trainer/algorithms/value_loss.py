"""The critic's loss: squared error, with PPO's clip around the values that the advantages were made with.

L = 1/2 * max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2), as in the reference implementation of PPO (Schulman et
al. 2017, arXiv:1707.06347; the clip is in its code, not in the paper: Huang et al. 2022, "The 37 implementation details
of proximal policy optimization", detail 9). A value that has already moved by more than c towards R has no gradient.

Dimension: N tokens (or steps) that the critic is trained on.
"""

import torch
from torch import Tensor


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """One term f32[N] for each value, to be averaged as the policy's are.

    Args:
        values: f32[N], with gradient.
        old_values: f32[N], of the same critic when the advantages were computed.
        returns: f32[N], the targets: advantages plus old values.
        clip: how far a value may move before its gradient ends, in units of reward.
    """
    near = old_values + (values - old_values).clamp(-clip, clip)
    return torch.maximum((values - returns).square(), (near - returns).square()) / 2
