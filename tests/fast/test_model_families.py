"""Families of causal models: engine, learner and transformers agree on every logprob, and what is published loads back.

Configurations are tiny and weights random. Sliding windows are shorter than the sessions, so that they matter.
"""

import json
from collections.abc import Callable

import numpy as np
import pytest
import torch
import transformers as hf
from torch_engine_kit import POSITIONS, VOCABULARY, make_engine, manifest, play_many
from transformers import AutoModelForCausalLM

from headrace.platform.config.learner import LearnerConfig
from headrace.platform.errors import EngineError
from headrace.serving.support import check_family, check_folder, check_numbers, needs_eager
from headrace.trainer.backends.torch import TorchBackend
from headrace.trainer.model import load_folder
from headrace.trainer.samples import Sample

_SIZE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 0,
}
_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MLA = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS}

FAMILIES: dict[str, Callable[[], hf.PretrainedConfig]] = {
    "llama": lambda: hf.LlamaConfig(**_SIZE, tie_word_embeddings=True),
    "qwen2": lambda: hf.Qwen2Config(**_SIZE, use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "qwen3": lambda: hf.Qwen3Config(**_SIZE, head_dim=16),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(**_SIZE, **_EXPERTS, head_dim=16, num_experts=4),
    "mistral": lambda: hf.MistralConfig(**_SIZE, sliding_window=8),
    "mixtral": lambda: hf.MixtralConfig(**_SIZE, **_MOE, sliding_window=8),
    "gemma2": lambda: hf.Gemma2Config(
        **_SIZE, **_ALTERNATING, head_dim=16, attn_logit_softcapping=4.0, final_logit_softcapping=5.0
    ),
    "gemma3": lambda: hf.Gemma3TextConfig(**_SIZE, **_ALTERNATING, head_dim=16),
    "phi3": lambda: hf.Phi3Config(**_SIZE, sliding_window=8),
    "gpt2": lambda: hf.GPT2Config(**_GPT2),
    "gpt_neox": lambda: hf.GPTNeoXConfig(**{k: v for k, v in _SIZE.items() if k != "num_key_value_heads"}),
    "olmo2": lambda: hf.Olmo2Config(**_SIZE),
    "smollm3": lambda: hf.SmolLM3Config(**_SIZE, no_rope_layers=[1, 0]),
    "deepseek_v3": lambda: hf.DeepseekV3Config(
        **{**_SIZE, "num_key_value_heads": 4},
        **_MLA,
        **_EXPERTS,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        n_shared_experts=1,
    ),
    "gpt_oss": lambda: hf.GptOssConfig(**_SIZE, **_MOE, **_ALTERNATING, head_dim=16),
    "granite": lambda: hf.GraniteConfig(**_SIZE, logits_scaling=4.0, attention_multiplier=0.1),
}
REFUSED: dict[str, tuple[Callable[[], hf.PretrainedConfig], str]] = {
    "mamba": (
        lambda: hf.MambaConfig(vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2),
        "MambaForCausalLM keeps a recurrent state",
    ),
    "jamba": (lambda: hf.JambaConfig(**_SIZE, num_experts=2), "JambaForCausalLM keeps a recurrent state"),
    "lfm2": (
        lambda: hf.Lfm2Config(**_SIZE, layer_types=["conv", "full_attention"]),
        "Lfm2ForCausalLM keeps layers of kind conv",
    ),
    "llama4": (
        lambda: hf.Llama4TextConfig(**_SIZE, num_local_experts=2, intermediate_size_mlp=96, head_dim=16),
        "layers of kind chunked_attention",
    ),
    "bloom": (
        lambda: hf.BloomConfig(vocab_size=VOCABULARY, hidden_size=64, n_layer=2, n_head=4),
        "takes no position_ids",
    ),
    "gpt_neo": (
        lambda: hf.GPTNeoConfig(
            **{**_SIZE, "num_layers": 2, "num_heads": 4}, attention_types=[[["global", "local"], 1]], window_size=8
        ),
        "more than the 8 positions of this GPTNeoForCausalLM",
    ),
}


def build(config: hf.PretrainedConfig):
    """A random model with logits spread widely enough for wrong ones to show."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, 0.25)
    return model


def reference(folder):
    """The model as transformers has it; caps on scores are computed only by its eager attention."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if needs_eager(model.config):
        model.set_attn_implementation("eager")
    return model


def logprobs_of(model, ids, temperature):
    """What `model` gives each token but the first, over one plain forward pass."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double() / temperature
    return torch.log_softmax(logits, -1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].numpy()


def sample(ids, temperature):
    ones, zeros = np.ones(len(ids), np.uint8), np.zeros(len(ids), np.float32)
    token_ids, temperatures = np.array(ids, np.int32), np.full(len(ids), temperature, np.float32)
    return Sample(
        episode_id="e",
        agent_id="",
        segment=0,
        lag=0,
        token_ids=token_ids,
        action_mask=ones,
        loss_mask=ones,
        behaviour_logprobs=zeros,
        advantages=zeros,
        temperatures=temperatures,
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("family", FAMILIES)
async def test_engine_learner_and_transformers_agree(tmp_path, family, temperature):
    build(FAMILIES[family]()).save_pretrained(tmp_path)
    engine = make_engine()
    await engine.load(manifest(0), str(tmp_path))
    sessions = await play_many(engine, 8, temperature=temperature)
    assert engine.stats().reused_tokens > 0
    await engine.close()
    model, backend = reference(tmp_path), TorchBackend(tmp_path, LearnerConfig())
    assert max(len(session.ids) for session in sessions) > 2 * 8, "longer than the windows"
    for session in sessions:
        expected = logprobs_of(model, session.ids, temperature)
        for start, generation in session.turns:
            rows = slice(start - 1, start - 1 + len(generation.token_ids))
            np.testing.assert_allclose(generation.logprobs, expected[rows], atol=1e-4)
        (learned,) = backend.logprobs([sample(session.ids, temperature)])
        np.testing.assert_allclose(learned[1:], expected, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
async def test_what_is_published_loads_back(tmp_path, family):
    first, second = tmp_path / "first", tmp_path / "second"
    build(FAMILIES[family]()).save_pretrained(first)
    backend = TorchBackend(first, LearnerConfig())
    with torch.no_grad():
        for tensor in backend.model.state_dict().values():
            if tensor.is_floating_point():
                tensor.mul_(1.01)
    second.mkdir()
    for name, data in backend.weights().items():
        (second / name).write_bytes(data)
    ids = [(5 * i + 3) % VOCABULARY for i in range(40)]
    wanted = logprobs_of(backend.model, ids, 1.0)
    np.testing.assert_allclose(logprobs_of(reference(second), ids, 1.0), wanted, atol=1e-5)
    engine = make_engine()
    for version, folder in enumerate((first, second)):
        await engine.load(manifest(version), str(folder))
    (session,) = await play_many(engine, 1, versions=(1,))
    expected = logprobs_of(backend.model, session.ids, 1.0)
    for start, generation in session.turns:
        rows = slice(start - 1, start - 1 + len(generation.token_ids))
        np.testing.assert_allclose(generation.logprobs, expected[rows], atol=1e-4)
    await engine.close()


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_put_into_slots_is_refused_by_its_configuration(tmp_path, family):
    config, message = REFUSED[family]
    config().save_pretrained(tmp_path)
    with pytest.raises(EngineError, match=message):
        check_folder(tmp_path, POSITIONS)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_works_is_accepted_by_its_configuration(tmp_path, family):
    FAMILIES[family]().save_pretrained(tmp_path)
    check_folder(tmp_path, POSITIONS)
    with pytest.raises(EngineError, match=f"max_positions={POSITIONS + 1} is more than the {POSITIONS}"):
        check_folder(tmp_path, POSITIONS + 1)


def test_a_rotation_that_changes_with_the_length_bounds_the_context():
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "rope_theta": 1e4}
    model = build(hf.Phi3Config(**_SIZE, rope_parameters=rope, original_max_position_embeddings=32))
    check_family(model, 32)
    with pytest.raises(EngineError, match="more than the 32 positions"):
        check_family(model, 33)


@pytest.mark.parametrize("text", ["{}", json.dumps({"model_type": "of-my-own"}), "no json"])
def test_a_folder_that_is_no_language_model_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(EngineError, match="no causal language model of transformers"):
        check_folder(tmp_path, POSITIONS)


def test_a_model_that_looks_both_ways_is_refused_by_its_numbers():
    config = hf.BertConfig(vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
    model = build(config)
    check_family(model, POSITIONS)
    with pytest.raises(EngineError, match="BertLMHeadModel gives other logits"):
        check_numbers(model)


def test_small_logits_do_not_hide_a_cap():
    model = AutoModelForCausalLM.from_config(FAMILIES["gemma2"]()).float()
    assert not TorchBackend(model, LearnerConfig())._token_logprobs.selects_hidden


def test_a_capped_model_is_loaded_with_its_cap(tmp_path):
    build(FAMILIES["gemma2"]()).save_pretrained(tmp_path)
    assert load_folder(tmp_path).config._attn_implementation == "eager"
