"""What each new token of a batch may look at, in the form that a model takes it.

Slots keep the keys of every position, so a sliding window is a matter of the mask alone. Invariant: a token sees itself
and what came before it in its own session, within the layer's window, and nothing of the padding or of other sessions.
"""

# B rows, T new tokens a row, L positions looked at

from typing import Any, TypeAlias

import torch
from torch import nn

FULL, SLIDING = "full_attention", "sliding_attention"
Mask: TypeAlias = torch.Tensor | dict[str, torch.Tensor]


class MaskPlan:
    """The masks of one architecture.

    Args:
        model: a causal language model; its configuration says which layers have a window.
        positions: the longest context, in tokens; a window that is no shorter is none.
    """

    def __init__(self, model: nn.Module, positions: int) -> None:
        config: Any = model.config
        text = config.get_text_config(decoder=True)
        kinds = set(getattr(text, "layer_types", None) or ())
        window = getattr(text, "sliding_window", None)
        if window is None or window >= positions or (kinds and SLIDING not in kinds):
            window = None
        self._window: int | None = window
        # Models with layers of several kinds take a mask for each; the others hand one mask to all layers.
        self._by_kind = bool(window and kinds)
        # The eager attention of transformers adds its mask to the scores; sdpa takes yes and no.
        self._adds = text._attn_implementation == "eager"

    def build(self, where: torch.Tensor, length: int) -> Mask:
        """The mask for new tokens at positions `where`, i64 [B, T], that look at positions below `length`.

        Returns:
            [B, 1, T, L], or one such tensor for each kind of layer: bool, or f32 to be added.
        """
        seen = torch.arange(length) <= where[:, None, :, None]
        if self._window is None:
            return self._form(seen)
        near = seen & (torch.arange(length) > (where - self._window)[:, None, :, None])
        return {FULL: self._form(seen), SLIDING: self._form(near)} if self._by_kind else self._form(near)

    def _form(self, seen: torch.Tensor) -> torch.Tensor:
        if not self._adds:
            return seen
        return torch.zeros(seen.shape).masked_fill_(~seen, torch.finfo(torch.float32).min)
