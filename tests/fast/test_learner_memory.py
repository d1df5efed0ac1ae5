"""bfloat16 and gradient checkpointing: what they change, and what they must not."""

import numpy as np
import pytest
import torch
from safetensors.torch import load
from test_packing import model_of, sample

from headrace.platform.config import GrpoConfig, LearnerConfig
from headrace.platform.errors import ConfigError
from headrace.trainer.algorithms import build_algorithm
from headrace.trainer.backends.torch import TorchBackend
from headrace.trainer.recomputing import recompute_layers


def batch():
    """Samples of two groups; those of one group begin alike."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(2, 24, 9).tolist(), rng.integers(2, 24, 14).tolist()]
    rows = [(g, n, prompts[g] + rng.integers(2, 24, 6 + 5 * n).tolist()) for g in range(2) for n in range(3)]
    return [sample(f"run.t{g}.{n}.0", ids, 10 * g + n, advantage=1.0 - n) for g, n, ids in rows]


def backend(family: str = "llama_gqa", **options) -> TorchBackend:
    return TorchBackend(model_of(family), LearnerConfig(microbatch_tokens=96, clip_grad=1e9, **options))


def gradients(trained: TorchBackend):
    """Loss and gradients of one step, by name; the gradients are caught before the optimizer clears them."""
    caught = {}
    inner = trained._optimizer.step

    def stepping():
        caught.update({name: p.grad.clone() for name, p in trained.model.named_parameters()})
        return inner()

    trained._optimizer.step = stepping
    loss = trained.step(batch(), build_algorithm(GrpoConfig()))["loss"]
    return loss, caught


@pytest.mark.parametrize("family", ["llama_gqa", "qwen3", "gpt_neox", "gpt2", "gemma2"])
def test_recomputed_layers_give_the_same_loss_and_gradients(family):
    """Packed models and, last, a padded one."""
    loss, plain = gradients(backend(family))
    again, recomputed = gradients(backend(family, gradient_checkpointing=True))
    assert again == loss
    for name, gradient in plain.items():
        torch.testing.assert_close(recomputed[name], gradient, rtol=1e-6, atol=1e-8, msg=name)


def kept_bytes(trained: TorchBackend) -> int:
    """What autograd keeps between the two passes of a step."""
    sizes = []

    def pack(tensor):
        sizes.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        micro = trained._microbatches(batch())[0]
        trained._token_logprobs.of(micro, micro.loss_mask)
    return sum(sizes)


def test_recomputed_layers_keep_less():
    assert kept_bytes(backend(gradient_checkpointing=True)) < 0.4 * kept_bytes(backend())


def test_a_model_without_layers_to_recompute_is_refused():
    with pytest.raises(ConfigError, match="Linear has no layer that transformers can checkpoint"):
        recompute_layers(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("family", ["llama_gqa", "gpt_neox", "gpt2", "gemma2"])
def test_bfloat16_moves_loss_and_gradients_by_rounding_only(family):
    loss, plain = gradients(backend(family))
    rounded_loss, rounded = gradients(backend(family, dtype="bfloat16"))
    assert rounded_loss == pytest.approx(loss, abs=0.03) and rounded_loss != loss
    both = [torch.cat([each.flatten() for each in found.values()]) for found in (plain, rounded)]
    assert all(each.dtype is torch.float32 for each in both)
    assert torch.nn.functional.cosine_similarity(*both, dim=0) > 0.99


def test_bfloat16_leaves_weights_and_optimizer_in_float32():
    trained = backend(dtype="bfloat16")
    trained.step(batch(), build_algorithm(GrpoConfig()))
    assert {tensor.dtype for tensor in load(trained.weights()["model.safetensors"]).values()} == {torch.float32}
    assert b'"float32"' in trained.weights()["config.json"]
    states = trained._optimizer.state_dict()["state"].values()
    assert {state["exp_avg"].dtype for state in states} == {torch.float32}


def test_packed_and_padded_samples_agree_in_bfloat16():
    packed, padded = backend(dtype="bfloat16"), backend(dtype="bfloat16")
    padded._token_logprobs.why_padded = "the test says so"
    for one, other in zip(packed.logprobs(batch()), padded.logprobs(batch()), strict=True):
        np.testing.assert_allclose(one, other, atol=0.1)


def test_without_an_update_the_ratio_in_bfloat16_is_one():
    """Behaviour logprobs of the same kernels: what is left is no noise of the learner's own."""
    trained = backend(dtype="bfloat16")
    first, again = trained.logprobs(batch()), trained.logprobs(batch())
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, other)
