"""How far the policy is from a reference: Schulman's three estimators ("Approximating KL divergence", 2020).

With x sampled from pi and d = log pi(x) - log ref(x), the mean of each estimates KL(pi || ref): k1 = d is unbiased and
often negative; k2 = d^2 / 2 is biased and never negative; k3 = exp(-d) - 1 + d is unbiased and never negative. As a
*loss*, the gradient of k1 is grad log pi, whose mean is 0; that of k2 is the true gradient of the divergence on policy;
that of k3 is close to it near the reference.
"""

from typing import Literal

from torch import Tensor

from headrace.trainer.corrections import log_ratio

Estimator = Literal["k1", "k2", "k3"]


def estimate(kind: Estimator, logprobs: Tensor, reference: Tensor) -> Tensor:
    """One estimate per token f32[N], in nats, with the gradient of `logprobs`.

    Args:
        kind: see the module.
        logprobs: f32[N], of the policy that sampled, or of the learner.
        reference: f32[N], of the same tokens.
    """
    difference = log_ratio(logprobs, reference)
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference.square() / 2
    return (-difference).exp() - 1.0 + difference
