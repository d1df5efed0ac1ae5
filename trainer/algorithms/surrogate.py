"""The policy loss that all algorithms share; they differ in their advantages.

::

    loss = - mean(weight * kept * surrogate(ratio, A)) + kl * mean(KL estimate) - entropy * mean(entropy)

The mean is one of aggregation.py, the surrogate, weights and kept sequences are of corrections.py, the estimates of
divergence.py. With no option set this is the clipped surrogate averaged over the step's loss tokens. The reported KL is
always k3 of learner against behaviour, r - 1 - log r with r = learner / behaviour: how far the learner has gone since
the tokens were sampled.

Dimension: N, the loss tokens of a microbatch.
"""

from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from headrace.platform.config.algorithm import AlgorithmOptions
from headrace.platform.contracts import AlgorithmNeeds, ScoredEpisode
from headrace.trainer.aggregation import LossColumns, aggregate, columns_of, from_here_on, present
from headrace.trainer.algorithms.divergence import estimate
from headrace.trainer.batch import LossOutput, LossTokens
from headrace.trainer.corrections import (
    clipped_surrogate,
    kept_sequences,
    log_ratio,
    product_log_ratio,
    sequence_log_ratio,
    sequence_weights,
    token_weights,
)

Options = TypeVar("Options", bound=AlgorithmOptions)


class PolicyLoss:
    """See the module. Stateless."""

    def __init__(self, options: AlgorithmOptions) -> None:
        self._options = options
        self.needs = AlgorithmNeeds(
            rewards=not options.returns.plain,
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
        elif options.ratio == "product":
            log_ratio_N = product_log_ratio(log_ratio_N, batch.row)
        ratio_N = log_ratio_N.exp()
        surrogate_N, clipped_N = clipped_surrogate(ratio_N, self._charged(batch), options.clip_low, options.clip_high)
        if weight_N is not None:
            surrogate_N = surrogate_N * weight_N
        loss = -self._mean(surrogate_N, batch)
        sums: dict[str, float] = {}
        if options.kl.coefficient > 0:
            reference_N = present(columns_of(batch).reference_logprobs, "logprobs of the reference")
            with torch.no_grad():
                sums["reference_kl"] = float(estimate("k3", logprobs, reference_N).sum())
            if options.kl.where == "loss":
                divergence_N = estimate(options.kl.kind, logprobs, reference_N)
                loss = loss + options.kl.coefficient * self._mean(divergence_N, batch)
        if options.entropy > 0:
            entropy_N = present(columns_of(batch).entropy, "the policy's entropy")
            loss = loss - options.entropy * self._mean(entropy_N, batch)
            sums["entropy"] = float(entropy_N.detach().sum())
        with torch.no_grad():
            kl_N = behaviour_log_ratio_N.exp() - 1.0 - behaviour_log_ratio_N
        return LossOutput(loss=loss, ratio=ratio_N.detach(), clipped=clipped_N, kl=kl_N, sums=sums)

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


class PolicyGradient(Generic[Options]):
    """What the algorithms of this folder share: everything but their advantages. Without state, unless one adds it."""

    def __init__(self, config: Options) -> None:
        self._config = config
        self.needs_variance = config.needs_variance
        self._loss = PolicyLoss(config)
        self.needs = self._loss.needs

    def loss(self, logprobs: Tensor, batch: LossTokens) -> LossOutput:
        """See `PolicyLoss`: learner logprobs f32[N] of the tokens of `batch` to this microbatch's share of the loss."""
        return self._loss(logprobs, batch)

    def observe(self, batch: Sequence[Sequence[ScoredEpisode]]) -> None:
        """See `Algorithm.observe`."""

    def state(self) -> dict[str, float]:
        """See `Algorithm.state`."""
        return {}

    def restore(self, state: Mapping[str, float]) -> None:
        """See `Algorithm.restore`."""
