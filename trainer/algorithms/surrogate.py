"""The policy loss that all algorithms share; they differ in their advantages.

::

    loss = - mean(weight * kept * surrogate(ratio, A)) + kl * mean(KL estimate) - entropy * mean(entropy)

The mean is one of aggregation.py, the surrogate, weights and kept sequences are of corrections.py, the estimates of
divergence.py. With no option set this is the clipped surrogate averaged over the step's loss tokens. The reported KL is
always k3 of learner against behaviour, r - 1 - log r with r = learner / behaviour: how far the learner has gone since
the tokens were sampled.

Dimension: N, the loss tokens of a microbatch.
"""

import torch
from torch import Tensor

from headrace.platform.config.algorithm import AlgorithmOptions
from headrace.trainer.aggregation import LossColumns, LossNeeds, aggregate, columns_of, from_here_on, present
from headrace.trainer.algorithms.divergence import estimate
from headrace.trainer.batch import LossOutput, LossTokens
from headrace.trainer.corrections import (
    clipped_surrogate,
    kept_sequences,
    log_ratio,
    sequence_log_ratio,
    sequence_weights,
    token_weights,
)


class PolicyLoss:
    """See the module. Stateless."""

    def __init__(self, options: AlgorithmOptions) -> None:
        self._options = options
        self.needs = LossNeeds(
            sequences=options.aggregation != "token",
            reference=options.kl.coefficient > 0,
            entropy=options.entropy > 0,
        )

    def __call__(self, logprobs: Tensor, batch: LossTokens) -> LossOutput:
        """This microbatch's share of the step's loss.

        Args:
            logprobs: learner logprobs f32[N] of the loss tokens, at the sampling temperature.
            batch: the same tokens; `LossColumns` where an option needs more than `LossTokens` have.

        Raises:
            ValueError: when a column that an option needs is missing.
        """
        options = self._options
        behaviour_log_ratio_N = log_ratio(logprobs, batch.behaviour_logprobs)
        log_ratio_N, weight_N = self._corrected(logprobs, behaviour_log_ratio_N, batch)
        if options.ratio == "sequence":
            log_ratio_N = sequence_log_ratio(log_ratio_N, batch.row)
        ratio_N = log_ratio_N.exp()
        surrogate_N, clipped_N = clipped_surrogate(ratio_N, self._charged(batch), options.clip_low, options.clip_high)
        if weight_N is not None:
            surrogate_N = surrogate_N * weight_N
        loss = -self._mean(surrogate_N, batch)
        if options.kl.coefficient > 0 and options.kl.where == "loss":
            reference_N = present(columns_of(batch).reference_logprobs, "logprobs of the reference")
            loss = loss + options.kl.coefficient * self._mean(estimate(options.kl.kind, logprobs, reference_N), batch)
        if options.entropy > 0:
            entropy_N = present(columns_of(batch).entropy, "the policy's entropy")
            loss = loss - options.entropy * self._mean(entropy_N, batch)
        with torch.no_grad():
            kl_N = behaviour_log_ratio_N.exp() - 1.0 - behaviour_log_ratio_N
        return LossOutput(loss=loss, ratio=ratio_N.detach(), clipped=clipped_N, kl=kl_N)

    def _corrected(
        self, logprobs: Tensor, behaviour_log_ratios: Tensor, batch: LossTokens
    ) -> tuple[Tensor, Tensor | None]:
        """The log ratio to clip f32[N], and what each token's surrogate is multiplied with, if anything."""
        correction = self._options.correction
        log_ratio_N, weight_N = behaviour_log_ratios, None
        if correction.kind == "decoupled":
            given = batch.proximal_logprobs if isinstance(batch, LossColumns) else None
            proximal_N = logprobs.detach() if given is None else given
            log_ratio_N = log_ratio(logprobs, proximal_N)
            stale_N = log_ratio(proximal_N, batch.behaviour_logprobs)
            if correction.weights == "token":
                weight_N = token_weights(stale_N, correction.cap)
            else:
                weight_N = sequence_weights(stale_N, batch.row, correction.cap)
        if correction.keep is not None:
            kept_N = kept_sequences(behaviour_log_ratios, batch.row, *correction.keep)
            weight_N = kept_N.float() if weight_N is None else weight_N * kept_N
        return log_ratio_N, weight_N

    def _charged(self, batch: LossTokens) -> Tensor:
        """Advantages f32[N], less what each token costs in divergence where that is part of the reward."""
        kl = self._options.kl
        if kl.coefficient == 0 or kl.where != "reward":
            return batch.advantages
        reference_N = present(columns_of(batch).reference_logprobs, "logprobs of the reference")
        with torch.no_grad():
            charge_N = from_here_on(estimate(kl.kind, batch.behaviour_logprobs, reference_N), batch.row)
        return batch.advantages - kl.coefficient * charge_N

    def _mean(self, values: Tensor, batch: LossTokens) -> Tensor:
        return aggregate(values, batch, self._options.aggregation, self._options.fixed_length)
