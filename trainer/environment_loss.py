"""The environment-token loss: cross entropy on what the environment answered, beside the loss of the policy.

coefficient * sum over the step's observation tokens t of -log p(t) / their number: a denominator of its own, so that
neither loss moves with the other's tokens, and microbatches add up exactly (case V6). Which tokens, `observations.py`
says; they have no advantage, no ratio, and are no time step in any return.

Dimensions: N chosen tokens of a microbatch, those of the policy's loss and observation tokens.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headrace.trainer.batch import LossOutput, MicroBatch
from headrace.trainer.forward import TokenLogprobs, TokenOutputs
from headrace.trainer.packing import PackedBatch
from headrace.trainer.samples import Sample


class EnvironmentLoss:
    """Of one step over `batch`, all of its samples."""

    def __init__(self, batch: Sequence[Sample], coefficient: float) -> None:
        self._coefficient = coefficient
        self._tokens = sum(int(row.observation_mask.sum()) for row in batch if row.observation_mask is not None)

    def outputs(
        self, forward: TokenLogprobs, micro: MicroBatch | PackedBatch, entropy: bool
    ) -> tuple[TokenOutputs, Tensor]:
        """One forward pass for both losses: outputs of the policy's loss tokens, and the logprobs of observations."""
        observed = _mask(micro)
        chosen = micro.loss_mask | observed
        found = forward.of(micro, chosen, entropy=entropy)
        own_N, observed_N = micro.loss_mask[chosen], observed[chosen]
        own = TokenOutputs(
            logprobs=found.logprobs[own_N],
            entropy=None if found.entropy is None else found.entropy[own_N],
            hidden=None if found.hidden is None else found.hidden[own_N],
        )
        return own, found.logprobs[observed_N]

    def join(self, output: LossOutput, observed: Tensor, step_tokens: int) -> LossOutput:
        """The policy's loss of a microbatch with this one's share added. `step_tokens` are the policy's: figures are
        sums over them, of which means are made."""
        if not self._tokens:
            return output
        loss = -observed.sum() / self._tokens
        sums = {**output.sums, "environment_loss": float(loss.detach()) * step_tokens}
        return replace(output, loss=output.loss + self._coefficient * loss, sums=sums)


def _mask(micro: MicroBatch | PackedBatch) -> Tensor:
    """Shaped as `micro.loss_mask`: true on observation tokens."""
    mask = torch.zeros_like(micro.loss_mask)
    for row, own in zip(micro.rows, micro.by_sample(mask), strict=True):
        if row.observation_mask is not None:
            own.copy_(torch.from_numpy(row.observation_mask == 1))
    return mask
