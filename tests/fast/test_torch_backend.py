"""The torch backend: conformance, exact logprobs for several model families, and its files."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from headrace.platform.config import GrpoConfig, LearnerConfig, TinyLlamaConfig
from headrace.platform.records import f32, i32
from headrace.platform.testing.conformance.backend import BACKEND_SUITE, BackendCase
from headrace.platform.testing.fakes.learning import FakeAlgorithm, FakeBackend
from headrace.trainer.algorithms import build_algorithm
from headrace.trainer.backends import build_backend
from headrace.trainer.backends.torch import TorchBackend
from headrace.trainer.model import build_tiny_llama, save_folder
from headrace.trainer.samples import Sample

TINY = TinyLlamaConfig(hidden=32, layers=2, heads=2, intermediate=32, max_positions=64)
VOCAB = 24
CONFIG = LearnerConfig(microbatch_tokens=64)


def tiny(seed: int = 0):
    return build_tiny_llama(TINY, VOCAB, seed, pad_token_id=0, eos_token_id=1)


def sample(name: str, length: int, seed: int, temperature: float = 1.0) -> Sample:
    rng = np.random.default_rng([seed, length])
    mask = np.zeros(length, np.uint8)
    mask[2:] = rng.integers(0, 2, length - 2)
    mask[-1] = 1
    return Sample(
        episode_id=name,
        agent_id="",
        segment=0,
        lag=0,
        token_ids=i32(rng.integers(0, VOCAB, length)),
        action_mask=mask,
        loss_mask=mask,
        behaviour_logprobs=f32(mask * -rng.uniform(2.5, 3.5, length)),
        advantages=f32(mask * rng.choice([-1.0, 1.0])),
        temperatures=f32([temperature] * length),
    )


def batch(seed: int) -> list[Sample]:
    return [sample(f"run.t{seed}.{n}.0", 5 + 2 * n, seed) for n in range(6)]


def poisoned(seed: int) -> list[Sample]:
    first, *rest = batch(seed)
    bad = f32(np.where(first.loss_mask == 1, np.nan, 0))
    return [dataclasses.replace(first, episode_id="run.t9.9.9", advantages=bad), *rest]


def case(backend, algorithm) -> BackendCase:
    return BackendCase(
        backend=backend,
        algorithm=algorithm,
        batch=batch,
        poisoned=poisoned,
        reorder=lambda samples: samples[::-1],
        lengths=lambda samples: [s.length for s in samples],
        bad_episode="run.t9.9.9",
    )


CASES = {
    "torch": case(lambda: TorchBackend(tiny(), CONFIG), lambda: build_algorithm(GrpoConfig())),
    "fake": case(FakeBackend, FakeAlgorithm),
}


@pytest.mark.parametrize("check", BACKEND_SUITE.values(), ids=BACKEND_SUITE)
@pytest.mark.parametrize("name", CASES)
async def test_conformance(name, check):
    await check(CASES[name])


def families():
    """Small models of several families: plain, absolute positions, untied, and with logits that are rescaled."""
    from transformers import (
        Gemma2Config,
        Gemma2ForCausalLM,
        GPT2Config,
        GPT2LMHeadModel,
        GPTNeoXConfig,
        GPTNeoXForCausalLM,
        GraniteConfig,
        GraniteForCausalLM,
    )

    shape = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    special = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    gemma = {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 32, "final_logit_softcapping": 0.5}
    return {
        "llama": (tiny, True),
        "gpt2": (
            lambda: GPT2LMHeadModel(
                GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=2, n_positions=64, **special)
            ),
            True,
        ),
        "gpt_neox": (
            lambda: GPTNeoXForCausalLM(GPTNeoXConfig(intermediate_size=32, **shape, **special)),
            True,
        ),
        "granite": (
            lambda: GraniteForCausalLM(GraniteConfig(intermediate_size=32, logits_scaling=7.0, **shape, **special)),
            False,
        ),
        "gemma2": (lambda: Gemma2ForCausalLM(Gemma2Config(**gemma, **shape, **special)), False),
    }


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "granite", "gemma2"])
def test_logprobs_equal_a_plain_forward(family, temperature):
    make, selects_hidden = families()[family]
    torch.manual_seed(0)
    model = make().eval()
    samples = [sample(f"e{n}", 5 + 4 * n, n, temperature) for n in range(4)]
    backend = TorchBackend(model, CONFIG)
    assert backend._token_logprobs.selects_hidden is selects_hidden
    for one, found in zip(samples, backend.logprobs(samples), strict=True):
        ids = torch.from_numpy(one.token_ids.astype(np.int64))[None]
        with torch.no_grad():
            expected = torch.log_softmax(model(input_ids=ids).logits[0] / temperature, -1)
        expected = expected[:-1].gather(1, ids[0, 1:, None])[:, 0].numpy()
        np.testing.assert_allclose(found[1:], expected, atol=1e-5)
        assert found[0] == 0.0


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "gemma2"])
def test_any_causal_model_can_be_trained_and_published(family, tmp_path):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    backend = TorchBackend(families()[family][0](), CONFIG)
    backend.step(batch(0), build_algorithm(GrpoConfig()))
    for name, data in backend.weights().items():
        (tmp_path / name).write_bytes(data)
    again = TorchBackend(AutoModelForCausalLM.from_pretrained(tmp_path), CONFIG)
    for one, other in zip(backend.logprobs(batch(0)), again.logprobs(batch(0)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_a_folder_in_a_folder_out(tmp_path):
    """Tokenizer files travel with every version; weights and configuration of the source do not."""
    tokenizer = {"tokenizer.json": b'{"a": 1}', "tokenizer_config.json": b"{}", "chat_template.jinja": b"{{ x }}"}
    save_folder(tiny(), tmp_path / "source", tokenizer)
    (tmp_path / "source" / "notes.bin").write_bytes(b"other")
    backend = build_backend(CONFIG, tmp_path / "source")
    backend.step(batch(0), build_algorithm(GrpoConfig()))
    files = backend.weights()
    assert {name: files[name] for name in tokenizer} == tokenizer
    assert set(files) == {*tokenizer, "config.json", "generation_config.json", "model.safetensors"}
    for name, data in files.items():
        (tmp_path / "source" / name).write_bytes(data)
    again = build_backend(CONFIG, tmp_path / "source")
    assert dict(again.weights()) == dict(files)


def test_weights_are_fp32_and_tied_tensors_are_written_once():
    from safetensors.torch import load

    tensors = load(TorchBackend(tiny(), CONFIG).weights()["model.safetensors"])
    assert "model.embed_tokens.weight" in tensors
    assert "lm_head.weight" not in tensors
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}


def test_the_learning_rate_warms_up():
    backend = TorchBackend(tiny(), LearnerConfig(lr=1e-3, warmup=4))
    rates = [backend.step(batch(0), build_algorithm(GrpoConfig()))["lr"] for _ in range(6)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3])


def test_the_gradient_norm_is_reported_before_clipping():
    backend = TorchBackend(tiny(), LearnerConfig(clip_grad=1e-3))
    assert backend.step(batch(0), build_algorithm(GrpoConfig()))["grad_norm"] > 1e-3


def test_training_raises_the_logprobs_of_what_was_rewarded():
    """Ten steps with advantage 1: the tokens of the loss get likelier."""
    backend = TorchBackend(tiny(), LearnerConfig(lr=3e-3, warmup=0))
    samples = [dataclasses.replace(s, advantages=f32(s.loss_mask)) for s in batch(0)]

    def mean() -> float:
        rows = backend.logprobs(samples)
        return float(np.mean(np.concatenate([r[s.loss_mask == 1] for r, s in zip(rows, samples, strict=True)])))

    before = mean()
    for _ in range(10):
        backend.step(samples, build_algorithm(GrpoConfig()))
    assert mean() > before + 0.1


def test_a_batch_without_loss_tokens_is_refused():
    empty = [dataclasses.replace(s, loss_mask=np.zeros(s.length, np.uint8)) for s in batch(0)]
    with pytest.raises(ValueError, match="no token"):
        TorchBackend(tiny(), CONFIG).step(empty, build_algorithm(GrpoConfig()))


def test_restore_refuses_the_weights_of_another_model():
    other = build_tiny_llama(TINY.model_copy(update={"layers": 1}), VOCAB, 0, pad_token_id=0, eos_token_id=1)
    with pytest.raises(ValueError, match="lack"):
        TorchBackend(tiny(), CONFIG).restore(TorchBackend(other, CONFIG).save())


def test_random_states_are_restored():
    backend = TorchBackend(tiny(), CONFIG)
    saved = backend.save()
    expected = (torch.rand(2).tolist(), np.random.rand(2).tolist())
    backend.restore(saved)
    assert (torch.rand(2).tolist(), np.random.rand(2).tolist()) == expected


def test_the_tiny_llama_is_initialised_as_documented():
    config = TinyLlamaConfig(hidden=96, layers=2, heads=3, intermediate=256)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    model = build_tiny_llama(config, 144, 1, pad_token_id=0, eos_token_id=1)
    assert torch.equal(torch.get_rng_state(), state), "building a model must not disturb other random numbers"
    layer = model.model.layers[0]
    expected = {
        model.model.embed_tokens: 1 / math.sqrt(96),
        layer.self_attn.q_proj: 1 / math.sqrt(96),
        layer.self_attn.o_proj: 0.5 / math.sqrt(96),
        layer.mlp.gate_proj: 1 / math.sqrt(96),
        layer.mlp.down_proj: 0.5 / math.sqrt(256),
    }
    for module, std in expected.items():
        assert float(module.weight.detach().std()) == pytest.approx(std, rel=0.05)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    again = build_tiny_llama(config, 144, 1, pad_token_id=0, eos_token_id=1)
    assert torch.equal(again.model.embed_tokens.weight, model.model.embed_tokens.weight)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "fixed"])
@pytest.mark.parametrize("shared", [True, False])
def test_every_mean_is_over_the_step_however_it_is_packed(aggregation: str, shared: bool):
    """case V6"""
    algorithm = build_algorithm(GrpoConfig(aggregation=aggregation, fixed_length=8))
    found = []
    for tokens in (16, 64, 4096):
        backend = TorchBackend(tiny(), LearnerConfig(microbatch_tokens=tokens, share_prefixes=shared))
        figures = backend.step(batch(5), algorithm)
        found.append((figures["loss"], figures["grad_norm"]))
    assert found[0][1] > 0
    for loss, norm in found[1:]:
        assert loss == pytest.approx(found[0][0], abs=1e-6) and norm == pytest.approx(found[0][1], rel=1e-4)
