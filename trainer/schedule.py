"""The learning rate of a step: a linear warm-up to `learner.lr`, then constant, or down to a share of it.

A step's rate depends on the configuration and on the steps before it alone, so that a resumed run goes on where it
was; one that is resumed with more `learner.steps` follows the longer schedule from there.
"""

import math

import torch

from headrace.platform.config.learner import LearnerConfig


def learning_rate(config: LearnerConfig, steps_done: int) -> float:
    """The rate of the step after `steps_done`.

    With n = `steps_done` + 1 and W = max(`warmup`, 1): lr * n / W up to step W, which has the whole rate. Then, with
    p = (n - W) / (`steps` - W), at most 1, the share of the way that is done, lr * (end + (1 - end) * shape(p)), where
    end is `lr_end` and shape is 1 (constant), 1 - p (linear) or (1 + cos(pi * p)) / 2 (cosine: Loshchilov and Hutter
    2017, arXiv:1608.03983, without restarts).
    """
    step, warmup = steps_done + 1, max(config.warmup, 1)
    warm = config.lr * min(1.0, step / warmup)
    if config.schedule == "constant" or step <= warmup:
        return warm
    done = min(1.0, (step - warmup) / max(config.steps - warmup, 1))
    shape = 1.0 - done if config.schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2
    return config.lr * (config.lr_end + (1.0 - config.lr_end) * shape)


def as_configured(optimizer: torch.optim.Optimizer, config: LearnerConfig, lr: float | None = None) -> None:
    """Give `optimizer`, which was just restored, the settings of the present configuration: a resumed run may have
    others. `lr` is for one whose rate no schedule sets before each step."""
    for group in optimizer.param_groups:
        group["betas"], group["weight_decay"] = config.betas, config.weight_decay
        if lr is not None:
            group["lr"] = lr
