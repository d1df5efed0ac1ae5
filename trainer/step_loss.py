"""The loss of one optimizer step, microbatch by microbatch: what every backend does between tensors and gradients.

Denominators are those of the whole step, so shares add up to its mean whatever the microbatches are (case V6), and on
however many ranks they are computed. Owns the columns that a loss asks for, the figures of the step, and the refusal
of a loss that is not finite, which names the episodes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.platform.contracts import Algorithm
from headrace.trainer.aggregation import step_sequences, with_columns
from headrace.trainer.batch import LossOutput, LossTokens, MicroBatch, step_tokens
from headrace.trainer.critic import Critic
from headrace.trainer.environment_loss import EnvironmentLoss
from headrace.trainer.forward import TokenLogprobs
from headrace.trainer.packing import PackedBatch
from headrace.trainer.samples import Sample
from headrace.trainer.step_statistics import StatisticsBuilder
from headrace.trainer.value_loss import step_values


class StepLoss:
    """See the module.

    Args:
        batch: all samples of the step, also those that another rank computes.
        forward: the model that learns.
        algorithm: whose loss it is.
        reference: the frozen model, where the algorithm needs it.
        where: names the step in errors.
        critic: whose loss is added, where the algorithm needs values.
        environment: coefficient of the environment-token loss; 0 computes none.

    Raises:
        ValueError: no token of `batch` enters the loss.
    """

    def __init__(
        self,
        batch: Sequence[Sample],
        forward: TokenLogprobs,
        algorithm: Algorithm,
        reference: TokenLogprobs | None,
        where: str,
        critic: Critic | None = None,
        environment: float = 0.0,
    ) -> None:
        self._tokens, self._sequences = step_tokens(batch), step_sequences(batch)
        if self._tokens == 0:
            raise ValueError("no token of this batch enters the loss")
        self._forward = forward
        self._algorithm = algorithm
        self._reference = reference
        self._where = where
        self._critic = critic if algorithm.needs.values else None
        self._environment = EnvironmentLoss(batch, environment) if environment else None
        self.values = step_values(batch)
        self.statistics = StatisticsBuilder()

    def __call__(self, micro: MicroBatch | PackedBatch) -> Tensor:
        """This microbatch's share of the step's loss, a scalar with gradient.

        Raises:
            ArithmeticError: it is not finite; names the episodes.
        """
        needs = self._algorithm.needs
        observed = None
        if self._environment is None:
            outputs = self._forward.of(micro, micro.loss_mask, entropy=needs.entropy)
        else:
            outputs, observed = self._environment.outputs(self._forward, micro, needs.entropy)
        tokens = with_columns(
            micro.loss_tokens(self._tokens),
            step_sequences=self._sequences,
            reference_logprobs=self._referred(micro) if needs.reference else None,
            entropy=outputs.entropy,
        )
        output: LossOutput = self._algorithm.loss(outputs.logprobs, tokens)
        if self._critic is not None:
            output = self._critic.join(output, micro, outputs.hidden, tokens, self.values)
        if self._environment is not None and observed is not None:
            output = self._environment.join(output, observed, self._tokens)
        self._check_finite(output, outputs.logprobs, tokens)
        self.statistics.add(output, tokens, outputs.logprobs)
        return output.loss

    @torch.no_grad()
    def _referred(self, micro: MicroBatch | PackedBatch) -> Tensor:
        if self._reference is None:
            raise ValueError("this loss needs the reference's logprobs, and the backend holds no reference")
        return self._reference.of(micro, micro.loss_mask).logprobs

    def _check_finite(self, output: LossOutput, logprobs: Tensor, tokens: LossTokens) -> None:
        if bool(torch.isfinite(output.loss)):
            return
        healthy_N = torch.isfinite(logprobs) & torch.isfinite(tokens.behaviour_logprobs)
        healthy_N &= torch.isfinite(tokens.advantages) & torch.isfinite(output.ratio)
        rows = sorted(set(tokens.row[~healthy_N].tolist())) or range(len(tokens.rows))
        raise ArithmeticError(
            f"{self._where}: the loss is not finite; episodes {episode_names([tokens.rows[b] for b in rows])}"
        )


def episode_names(samples: Sequence[Sample]) -> str:
    """The episodes of `samples`, each once, in order."""
    return ", ".join(sorted({sample.episode_id for sample in samples}))
