"""Logprobs of chosen tokens under a causal language model, at the least cost that stays exact.

Only loss positions go through the output layer: the decoder's hidden states are selected first. Models whose logits
are more than that layer (soft caps, scales) are recognised by a trial forward pass at construction and take their
own full forward instead. Samples that are packed without padding need a model that keeps them apart, which a trial at
construction finds out; for others rows are padded on the right, and a causal model's real tokens never see what follows
them, so no attention mask is needed and padding costs nothing but time (case T10).

The model runs in evaluation mode, in training too: dropout would make the learner's logprobs differ from the
engine's, and a ratio that is not 1 on fresh weights is noise.

Dimensions: B rows, T tokens, S tokens of a packed row, M tokens of its samples, N chosen tokens, H hidden width,
V vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.trainer.batch import MicroBatch
from headrace.trainer.packing import PackedBatch
from headrace.trainer.packing_support import arguments, use_packed_attention

PROBE_TOKENS = 4
PROBE_TOLERANCE = 1e-4


class TokenLogprobs:
    """Learner logprobs of tokens that a mask chooses. Keeps a reference to `model` and puts it in evaluation mode.

    Args:
        model: a causal language model.
        packed: whether packed batches are wanted. `why_padded` says why they cannot be had; it is empty where they can.
    """

    def __init__(self, model: nn.Module, packed: bool = False) -> None:
        model.eval()
        self._model: Any = model
        self.selects_hidden = self._can_select()
        self.why_padded = use_packed_attention(model) if packed else "nobody asked for packed batches"

    def of(self, batch: MicroBatch | PackedBatch, chosen: Tensor) -> Tensor:
        """Logprobs f32[N] of the tokens of `batch` where `chosen` is true, in its order.

        Args:
            batch: packed only where `why_padded` is empty.
            chosen: a bool mask as `batch.loss_mask` is, true for no sample's first token.
        """
        if isinstance(batch, MicroBatch):
            return self(batch.token_ids, batch.is_token, chosen, batch.temperatures)
        chosen_N = torch.nonzero(chosen)[:, 0]
        predictor_N = batch.place[chosen_N - 1]
        given = arguments(batch)
        if self.selects_hidden:
            logits_NV = self._head(self._model.base_model(**given).last_hidden_state[0].index_select(0, predictor_N))
        else:
            logits_NV = self._model(**given).logits[0].index_select(0, predictor_N)
        scaled_NV = logits_NV.float() / batch.temperatures[chosen_N][:, None]
        return -F.cross_entropy(scaled_NV, batch.targets[chosen_N], reduction="none")

    def __call__(self, token_ids: Tensor, is_token: Tensor, chosen: Tensor, temperatures: Tensor) -> Tensor:
        """Logprobs f32[N], in row-major order, of the tokens where `chosen` is true.

        Args:
            token_ids: i64[B, T]; anything at all where `is_token` is false.
            is_token: bool[B, T], false in the padding.
            chosen: bool[B, T]; column 0 must be false, since nothing predicts the first token.
            temperatures: f32[B, T]; logits are divided by it.
        """
        safe_BT = torch.where(is_token, token_ids, 0)
        predictor_BT = chosen[:, 1:]
        if self.selects_hidden:
            logits_NV = self._head(self._hidden(safe_BT[:, :-1])[predictor_BT])
        else:
            logits_NV = self._model(input_ids=safe_BT[:, :-1], use_cache=False).logits[predictor_BT]
        target_N = safe_BT[:, 1:][predictor_BT]
        scaled_NV = logits_NV.float() / temperatures[:, 1:][predictor_BT][:, None]
        return -F.cross_entropy(scaled_NV, target_N, reduction="none")

    def _hidden(self, token_ids: Tensor) -> Tensor:
        """The decoder's last hidden states [B, T, H]."""
        hidden: Tensor = self._model.base_model(input_ids=token_ids, use_cache=False).last_hidden_state
        return hidden

    def _head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._model.get_output_embeddings()(hidden)
        return logits

    @torch.no_grad()
    def _can_select(self) -> bool:
        """Whether output layer over hidden states equals the model's own logits, on a few tokens."""
        model = self._model
        if model.get_output_embeddings() is None or model.base_model is model:
            return False
        if getattr(model.config.get_text_config(decoder=True), "final_logit_softcapping", None):
            return False  # small logits hardly show the cap; trained ones do
        device = next(model.parameters()).device
        probe = torch.arange(PROBE_TOKENS, device=device)[None] % int(model.config.get_text_config().vocab_size)
        full = model(input_ids=probe, use_cache=False).logits
        output = model.base_model(input_ids=probe, use_cache=False)
        if not hasattr(output, "last_hidden_state"):
            return False
        selected = self._head(output.last_hidden_state)
        return selected.shape == full.shape and torch.allclose(selected, full, atol=PROBE_TOLERANCE, rtol=1e-4)
