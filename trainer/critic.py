"""The critic: what a state is worth, as a linear head on hidden states, its training, and its part of the checkpoint.

The state before a token is the last hidden state that predicts it; the head is linear and begins at 0, so that a new
critic says 0 of everything and draws nothing at random. `head` reads the policy's own hidden states, and its loss
reaches the policy's weights, times `coefficient`, unless `detach`. `model` is a copy of the base model besides.

Owns the critic's own weights and their optimizer, which has a constant rate and clips its gradient apart from the
policy's. In `warmup` batches the backend leaves the policy as it is. The critic's weights are not published: they are
`critic.safetensors` and `critic.pt` of a checkpoint.

Dimensions: N loss tokens of a microbatch, T tokens of a sample, H hidden width.
"""

import copy
import io
import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from headrace.platform.config.algorithm import CriticConfig
from headrace.platform.config.learner import LearnerConfig
from headrace.platform.errors import ConfigError
from headrace.platform.records.arrays import F32
from headrace.trainer.batch import LossOutput, LossTokens, MicroBatch
from headrace.trainer.forward import TokenLogprobs
from headrace.trainer.packing import PackedBatch
from headrace.trainer.recomputing import recompute_layers
from headrace.trainer.schedule import as_configured
from headrace.trainer.value_loss import value_loss
from headrace.trainer.weights import load_weight_file, weight_file

Batch: TypeAlias = MicroBatch | PackedBatch
_log = logging.getLogger(__name__)
CRITIC_FILE = "critic.safetensors"
CRITIC_OPTIMIZER_FILE = "critic.pt"
_HEAD = "value_head"


class Critic:
    """See the module.

    Args:
        config: the critic's.
        learner: betas, weight decay, clipping and precision are the learner's.
        model: the policy, at the weights that the run begins with.
        policy: what computes its hidden states.

    Raises:
        ConfigError: the model does not give its last hidden states.
    """

    def __init__(self, config: CriticConfig, learner: LearnerConfig, model: Any, policy: TokenLogprobs) -> None:
        if not policy.gives_states:
            raise ConfigError(
                f"learner.algorithm.name=ppo: its critic reads last hidden states, which {type(model).__name__}"
                " does not give; use grpo, rloo or reinforce"
            )
        self._config, self._learner = config, learner
        self._clip_grad = learner.clip_grad
        self._own = nn.Module()
        self._states = policy
        if config.kind == "model":
            trunk = copy.deepcopy(model)
            self._own.add_module("model", trunk)
            self._states = TokenLogprobs(trunk, packed=True, dtype=getattr(torch, learner.dtype))
            if learner.gradient_checkpointing:
                recompute_layers(trunk)
        width = int(model.config.get_text_config(decoder=True).hidden_size)
        make: Any = nn.utils.skip_init
        self._head = make(nn.Linear, width, 1, device=next(model.parameters()).device)
        self._own.add_module(_HEAD, self._head)
        nn.init.zeros_(self._head.weight)
        nn.init.zeros_(self._head.bias)
        self._optimizer = torch.optim.AdamW(
            self._own.parameters(), lr=config.lr, betas=learner.betas, weight_decay=learner.weight_decay
        )
        self._batches = 0

    @property
    def warming_up(self) -> bool:
        """Whether the policy must be left as it is in this batch."""
        return self._batches < self._config.warmup

    @torch.no_grad()
    def values(self, micro: Batch) -> list[F32]:
        """For each row of `micro` f32[T]: the value of the state after each token."""
        values = self._of(self._states.states(micro))
        return [row.cpu().numpy().copy() for row in micro.by_sample(values)]

    def join(
        self, output: LossOutput, micro: Batch, hidden: Tensor | None, tokens: LossTokens, states: int
    ) -> LossOutput:
        """The policy's loss of a microbatch with this critic's added.

        Args:
            output: the policy's.
            micro: the microbatch.
            hidden: the policy's hidden states [N, H] before its loss tokens, where its pass has them.
            tokens: the loss tokens.
            states: the states that the step trains on (`step_values`).

        Raises:
            ValueError: the samples were not credited by value.
        """
        if self._config.kind == "model" or hidden is None:
            hidden_NH = self._states.before(micro, micro.loss_mask)
        else:
            hidden_NH = hidden
        if self._config.kind == "head" and self._config.detach:
            hidden_NH = hidden_NH.detach()
        loss = value_loss(self._of(hidden_NH), tokens, states, self._config.clip)
        figure = float(loss.detach()) * tokens.step_tokens  # figures are sums over tokens, of which means are made
        return replace(
            output, loss=output.loss + self._config.coefficient * loss, sums={**output.sums, "value_loss": figure}
        )

    def clip(self) -> float:
        """Clip the gradient of the critic's own weights; returns its norm before."""
        return float(nn.utils.clip_grad_norm_(self._own.parameters(), self._clip_grad))

    def step(self, micros: Iterable[Batch], states: int) -> None:
        """Step by the gradient that is there, then once more over the batch for each of the other `epochs`.

        Args:
            micros: the microbatches of the batch, which can be gone through again.
            states: see `join`.

        Raises:
            ArithmeticError: a gradient of a later epoch is not finite. Nothing has changed.
        """
        before = (
            copy.deepcopy((self._own.state_dict(), self._optimizer.state_dict())) if self._config.epochs > 1 else None
        )
        self._optimizer.step()
        for _ in range(1, self._config.epochs):
            self.zero_grad()
            for micro in micros:
                with torch.set_grad_enabled(self._config.kind == "model"):
                    hidden_NH = self._states.before(micro, micro.loss_mask)
                loss = value_loss(self._of(hidden_NH), micro.loss_tokens(1), states, self._config.clip)
                loss = self._config.coefficient * loss
                loss.backward()  # type: ignore[no-untyped-call]
            if not np.isfinite(self.clip()):
                if before is not None:
                    self._own.load_state_dict(before[0])
                    self._optimizer.load_state_dict(before[1])
                raise ArithmeticError("the critic's gradient is not finite")
            self._optimizer.step()
        self.zero_grad()
        self._batches += 1

    def zero_grad(self) -> None:
        """Forget gradients."""
        self._optimizer.zero_grad(set_to_none=True)

    def save(self) -> dict[str, bytes]:
        """Weights, and optimizer with the count of batches."""
        buffer = io.BytesIO()
        torch.save({"optimizer": self._optimizer.state_dict(), "batches": self._batches}, buffer)
        return {CRITIC_FILE: weight_file(self._own), CRITIC_OPTIMIZER_FILE: buffer.getvalue()}

    def restore(self, files: Mapping[str, bytes]) -> None:
        """Take up what `save` returned; without it the critic begins anew, and the log says so.

        Raises:
            ValueError: its weights are those of another critic.
        """
        if CRITIC_FILE not in files:
            _log.warning("the checkpoint holds no critic: the run went on without one until here, so it begins anew")
            return
        load_weight_file(self._own, files[CRITIC_FILE])
        kept = torch.load(io.BytesIO(files[CRITIC_OPTIMIZER_FILE]), weights_only=True)
        self._optimizer.load_state_dict(kept["optimizer"])
        as_configured(self._optimizer, self._learner, lr=self._config.lr)
        self._batches = kept["batches"]

    def _of(self, hidden: Tensor) -> Tensor:
        values: Tensor = self._head(hidden).squeeze(-1)
        return values
