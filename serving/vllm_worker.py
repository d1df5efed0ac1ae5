"""What vLLM's workers do for an update of the weights, beside what they can do by themselves.

On a CPU vLLM multiplies with packed copies of the weights. A reload makes those of every layer anew whose tensors it
reads; an output head that is tied to the embedding has a copy of its own and no tensor, so it would keep that of the
first version for ever: an error of some hundredths of a nat, which only a comparison with the learner shows (S10).
"""

from typing import Any


class WeightUpdates:
    """Mixed into vLLM's worker, of which it uses `reload_weights` and the model."""

    def take_up_weights(self, weights_path: str) -> None:
        """Read the model in a folder in place of the present one, tied heads included."""
        from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

        worker: Any = self
        worker.reload_weights(weights_path=weights_path)
        for layer in worker.get_model().modules():
            method = getattr(layer, "quant_method", None)
            if isinstance(method, UnquantizedEmbeddingMethod):
                method.process_weights_after_loading(layer)
