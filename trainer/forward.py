"""Logprobs of chosen tokens under a causal language model, at the least cost that stays exact.

Only loss positions go through the output layer: the decoder's hidden states are selected first. Models whose logits
are more than that layer (soft caps, scales) are recognised by a trial forward pass at construction and take their
own full forward instead. Samples that are packed without padding need a model that keeps them apart, which a trial at
construction finds out; for others rows are padded on the right, and a causal model's real tokens never see what follows
them, so no attention mask is needed and padding costs nothing but time (case T10).

The model runs in evaluation mode, in training too: dropout would make the learner's logprobs differ from the
engine's, and a ratio that is not 1 on fresh weights is noise.

In bfloat16 the decoder alone is computed so, by autocast over float32 weights: the output layer, where it can be
applied by itself, and everything after it are float32.

Dimensions: B rows, T tokens, S tokens of a packed row, M tokens of its samples, N chosen tokens, H hidden width,
V vocabulary.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.trainer.batch import MicroBatch
from headrace.trainer.packing import PackedBatch
from headrace.trainer.packing_support import arguments, use_packed_attention

PROBE_TOKENS = 4
PROBE_TOLERANCE = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenOutputs:
    """Of N chosen tokens: logprobs f32[N]; entropy f32[N] of the distribution that each was drawn from, in nats, where
    it was asked for; and hidden [N, H], the last hidden state that predicts each, where the model gives it."""

    logprobs: Tensor
    entropy: Tensor | None = None
    hidden: Tensor | None = None


class TokenLogprobs:
    """Learner logprobs of tokens that a mask chooses. Keeps a reference to `model` and puts it in evaluation mode.

    Args:
        model: a causal language model.
        packed: whether packed batches are wanted. `why_padded` says why they cannot be had; it is empty where they can.
        dtype: what the decoder is computed in.
        within: what the model is called in.
    """

    def __init__(
        self,
        model: nn.Module,
        packed: bool = False,
        dtype: torch.dtype = torch.float32,
        within: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        model.eval()
        self._within = within
        self._model: Any = model
        self._device = next(model.parameters()).device.type
        self._dtype = dtype
        self.gives_states = self._has_states()
        self.selects_hidden = self.gives_states and self._can_select()
        self.why_padded = use_packed_attention(model) if packed else "nobody asked for packed batches"

    def of(self, batch: MicroBatch | PackedBatch, chosen: Tensor, entropy: bool = False) -> TokenOutputs:
        """The tokens of `batch` where `chosen` is true, in its order, at the temperatures that they were sampled at.

        Args:
            batch: packed only where `why_padded` is empty.
            chosen: a bool mask as `batch.loss_mask` is, true for no sample's first token.
            entropy: whether it is wanted.
        """
        with self._within():
            return self._of(batch, chosen, entropy)

    def _of(self, batch: MicroBatch | PackedBatch, chosen: Tensor, entropy: bool) -> TokenOutputs:
        if isinstance(batch, MicroBatch):
            return self._padded(batch.token_ids, batch.is_token, chosen, batch.temperatures, entropy)
        chosen_N = torch.nonzero(chosen)[:, 0]
        predictor_N = batch.place[chosen_N - 1]
        given, hidden_NH = arguments(batch), None
        if self.selects_hidden:
            with self._precision():
                hidden_SH = self._model.base_model(**given).last_hidden_state[0]
            hidden_NH = hidden_SH.index_select(0, predictor_N).float()
            logits_NV = self._head(hidden_NH)
        else:
            with self._precision():
                logits_NV = self._model(**given).logits[0].index_select(0, predictor_N)
        return _outputs(logits_NV, batch.targets[chosen_N], batch.temperatures[chosen_N], hidden_NH, entropy)

    def states(self, batch: MicroBatch | PackedBatch) -> Tensor:
        """The last hidden state after each token: f32[B, T, H] of a padded batch, anything in its padding, f32[M, H] of
        a packed one. Only where `gives_states`."""
        if isinstance(batch, MicroBatch):
            return self._hidden(torch.where(batch.is_token, batch.token_ids, 0)).float()
        with self._precision():
            hidden_SH: Tensor = self._model.base_model(**arguments(batch)).last_hidden_state[0]
        return hidden_SH.index_select(0, batch.place).float()

    def before(self, batch: MicroBatch | PackedBatch, chosen: Tensor) -> Tensor:
        """The last hidden states f32[N, H] that predict the tokens where `chosen` is true, as `of` has them."""
        states = self.states(batch)
        if isinstance(batch, MicroBatch):
            return states[:, :-1][chosen[:, 1:]]
        return states.index_select(0, torch.nonzero(chosen)[:, 0] - 1)

    def __call__(self, token_ids: Tensor, is_token: Tensor, chosen: Tensor, temperatures: Tensor) -> Tensor:
        """Logprobs f32[N], in row-major order, of the tokens where `chosen` is true.

        Args:
            token_ids: i64[B, T]; anything at all where `is_token` is false.
            is_token: bool[B, T], false in the padding.
            chosen: bool[B, T]; column 0 must be false, since nothing predicts the first token.
            temperatures: f32[B, T]; logits are divided by it.
        """
        return self._padded(token_ids, is_token, chosen, temperatures, entropy=False).logprobs

    def _padded(
        self, token_ids: Tensor, is_token: Tensor, chosen: Tensor, temperatures: Tensor, entropy: bool
    ) -> TokenOutputs:
        safe_BT = torch.where(is_token, token_ids, 0)
        predictor_BT = chosen[:, 1:]
        hidden_NH = None
        if self.selects_hidden:
            hidden_NH = self._hidden(safe_BT[:, :-1])[predictor_BT].float()
            logits_NV = self._head(hidden_NH)
        else:
            with self._precision():
                logits_NV = self._model(input_ids=safe_BT[:, :-1], use_cache=False).logits[predictor_BT]
        target_N = safe_BT[:, 1:][predictor_BT]
        return _outputs(logits_NV, target_N, temperatures[:, 1:][predictor_BT], hidden_NH, entropy)

    def _hidden(self, token_ids: Tensor) -> Tensor:
        """The decoder's last hidden states [B, T, H]."""
        with self._precision():
            hidden: Tensor = self._model.base_model(input_ids=token_ids, use_cache=False).last_hidden_state
        return hidden

    def _precision(self) -> torch.autocast:
        return torch.autocast(self._device, self._dtype, enabled=self._dtype is not torch.float32)

    def _head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._model.get_output_embeddings()(hidden)
        return logits

    @torch.no_grad()
    def _has_states(self) -> bool:
        """Whether the model has a decoder that gives its last hidden states."""
        decoder = self._model.base_model
        if decoder is self._model:
            return False
        return hasattr(decoder(input_ids=self._probe(), use_cache=False), "last_hidden_state")

    @torch.no_grad()
    def _can_select(self) -> bool:
        """Whether output layer over hidden states equals the model's own logits, on a few tokens."""
        model = self._model
        if model.get_output_embeddings() is None:
            return False
        if getattr(model.config.get_text_config(decoder=True), "final_logit_softcapping", None):
            return False  # small logits hardly show the cap; trained ones do
        probe = self._probe()
        full = model(input_ids=probe, use_cache=False).logits
        selected = self._head(model.base_model(input_ids=probe, use_cache=False).last_hidden_state)
        return selected.shape == full.shape and torch.allclose(selected, full, atol=PROBE_TOLERANCE, rtol=1e-4)

    def _probe(self) -> Tensor:
        device = next(self._model.parameters()).device
        vocabulary = int(self._model.config.get_text_config().vocab_size)
        return torch.arange(PROBE_TOKENS, device=device)[None] % vocabulary


def _outputs(
    logits: Tensor, targets: Tensor, temperatures: Tensor, hidden: Tensor | None, entropy: bool
) -> TokenOutputs:
    """From logits [N, V], targets i64[N] and temperatures f32[N]."""
    scaled_NV = logits.float() / temperatures[:, None]
    logprobs_N = -F.cross_entropy(scaled_NV, targets, reduction="none")
    return TokenOutputs(logprobs=logprobs_N, entropy=_entropy(scaled_NV) if entropy else None, hidden=hidden)


def _entropy(logits: Tensor) -> Tensor:
    """f32[N], in nats, of the softmax of logits f32[N, V]: log Z - sum(p * logit)."""
    return logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)
