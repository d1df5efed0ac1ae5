"""Packed, padded and prefix-shared batches: the same losses and gradients; which models are padded, and why."""

import dataclasses

import numpy as np
import pytest
import torch

from headrace.platform.config import GrpoConfig, LearnerConfig
from headrace.platform.records import f32, i32
from headrace.trainer.algorithms import Grpo
from headrace.trainer.backends.torch import TorchBackend
from headrace.trainer.batch import pack, step_tokens
from headrace.trainer.forward import TokenLogprobs
from headrace.trainer.packed_attention import LEAF, NAME, Part, causal_parts, packed_attention
from headrace.trainer.packing import pack_tokens
from headrace.trainer.samples import Sample
from headrace.trainer.shared_prefix import bundles, singles

VOCAB = 24
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
    "initializer_range": 0.2,
}
PACKED = ["llama", "llama_gqa", "qwen2", "qwen3", "gpt_neox", "granite", "gpt2"]
PADDED = {
    "mistral_window": "sliding_window",
    "qwen2_window": "sliding_attention",
    "gemma2": "eager",
    "llama_dynamic": "rotary",
    "bloom": "attention is 'eager'",
    "lfm2": "layers of conv",
}


def model_of(name: str):
    """A small model; weights are drawn wide, so that a token that sees too much shows."""
    import transformers as t

    torch.manual_seed(3)
    grouped = {**SHAPE, "num_key_value_heads": 2}
    wide = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    window = {**grouped, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    gpt2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512, "bos_token_id": None}
    soft = {**grouped, "head_dim": 8, "attn_implementation": "eager"}
    make = {
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**SHAPE)),
        "llama_gqa": lambda: t.LlamaForCausalLM(t.LlamaConfig(**grouped)),
        "qwen2": lambda: t.Qwen2ForCausalLM(t.Qwen2Config(**grouped)),
        "qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**grouped, head_dim=8)),
        "gpt_neox": lambda: t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**SHAPE)),
        "granite": lambda: t.GraniteForCausalLM(t.GraniteConfig(**SHAPE, logits_scaling=3.0)),
        "gpt2": lambda: t.GPT2LMHeadModel(t.GPT2Config(**gpt2, eos_token_id=1)),
        "mistral_window": lambda: t.MistralForCausalLM(t.MistralConfig(**grouped, sliding_window=4)),
        "qwen2_window": lambda: t.Qwen2ForCausalLM(t.Qwen2Config(**window)),
        "gemma2": lambda: t.Gemma2ForCausalLM(t.Gemma2Config(**soft)),
        "llama_dynamic": lambda: t.LlamaForCausalLM(t.LlamaConfig(**SHAPE, rope_parameters=wide)),
        "bloom": lambda: t.BloomForCausalLM(t.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=1, n_head=4)),
        "lfm2": lambda: t.Lfm2ForCausalLM(t.Lfm2Config(**grouped, layer_types=["conv", "full_attention"])),
    }
    return make[name]().float().eval()


def sample(name: str, token_ids, seed: int, advantage: float = 1.0) -> Sample:
    rng = np.random.default_rng(seed)
    length = len(token_ids)
    mask = np.zeros(length, np.uint8)
    mask[1:] = rng.integers(0, 2, length - 1)
    mask[-1] = 1
    return Sample(
        episode_id=name,
        agent_id="",
        segment=0,
        lag=0,
        token_ids=i32(token_ids),
        action_mask=mask,
        loss_mask=mask,
        behaviour_logprobs=f32(mask * -rng.uniform(2, 4, length)),
        advantages=f32(mask * advantage),
        temperatures=f32([0.8] * length),
    )


def samples(longest: int = 30) -> list[Sample]:
    """Two groups of three with a prompt each, one that is all prompt, one that shares nothing, and a long one. Masks
    reach into the prompts: a shared token may be in the loss of several samples."""
    rng = np.random.default_rng(7)
    found = []
    for group in range(2):
        prompt = rng.integers(2, VOCAB, 12 + group)
        for member in range(3):
            own = rng.integers(2, VOCAB, 2 + 7 * member)
            found.append(sample(f"g{group}m{member}", [*prompt, *own], 10 * group + member, (-1.0) ** member))
        found.append(sample(f"g{group}same", prompt, 50 + group, 0.5))
    found.append(sample("alone", rng.integers(2, VOCAB, 9), 90))
    return [*found, sample("long", rng.integers(2, VOCAB, longest), 91)]


def batches(kind: str, given, microbatch_tokens: int):
    if kind == "padded":
        return pack(given, microbatch_tokens)
    return pack_tokens(given, microbatch_tokens, share_prefixes=kind == "shared")


def gradients(model, kind: str, given, microbatch_tokens: int = 10_000):
    """Loss and gradients of one step without an optimizer."""
    forward, algorithm, loss = TokenLogprobs(model, packed=True), Grpo(GrpoConfig()), 0.0
    model.zero_grad()
    for micro in batches(kind, given, microbatch_tokens):
        output = algorithm.loss(forward.of(micro, micro.loss_mask).logprobs, micro.loss_tokens(step_tokens(given)))
        output.loss.backward()
        loss += float(output.loss.detach())
    return loss, [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("family", PACKED)
def test_packed_padded_and_shared_agree(family):
    model = model_of(family)
    expected_loss, expected = gradients(model, "padded", samples())
    assert TokenLogprobs(model, packed=True).why_padded == ""
    for kind in ("packed", "shared"):
        loss, found = gradients(model, kind, samples())
        assert loss == pytest.approx(expected_loss, abs=1e-5)
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", PADDED)
def test_other_models_are_padded_and_say_why(family):
    model = model_of(family)
    before = model.config._attn_implementation
    forward = TokenLogprobs(model, packed=True)
    assert PADDED[family] in forward.why_padded
    assert model.config._attn_implementation == before
    found = TorchBackend(model, LearnerConfig(microbatch_tokens=64)).logprobs(samples())
    for one, logprobs in zip(samples(), found, strict=True):
        ids = torch.from_numpy(one.token_ids.astype(np.int64))[None]
        with torch.no_grad():
            expected = torch.log_softmax(model(input_ids=ids).logits[0, :-1] / 0.8, -1).gather(1, ids[0, 1:, None])
        np.testing.assert_allclose(logprobs[1:], expected[:, 0].numpy(), atol=1e-5)


@pytest.mark.parametrize("kind", ["padded", "packed", "shared"])
def test_microbatches_add_up_and_order_changes_nothing(kind):
    """case V6"""
    model = model_of("llama")
    whole_loss, whole = gradients(model, kind, samples())
    assert len(batches(kind, samples(), 64)) > 2
    split_loss, split = gradients(model, kind, samples(), 64)
    assert split_loss == pytest.approx(whole_loss, abs=1e-6)
    for one, other in zip(whole, split, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    reversed_loss, reverse = gradients(model, kind, samples()[::-1], 64)
    assert reversed_loss == split_loss
    assert all(torch.equal(a, b) for a, b in zip(split, reverse, strict=True))


@pytest.mark.parametrize("kind", ["padded", "packed", "shared"])
@pytest.mark.parametrize("field", ["behaviour_logprobs", "advantages", "temperatures"])
def test_nan_at_a_masked_position_does_not_leak(kind, field):
    """case T9"""
    spoiled = [
        dataclasses.replace(s, **{field: f32(np.where(s.loss_mask == 1, getattr(s, field), np.nan))}) for s in samples()
    ]
    model = model_of("llama")
    loss, one = gradients(model, kind, samples(), 64)
    spoiled_loss, other = gradients(model, kind, spoiled, 64)
    assert spoiled_loss == loss
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_no_padding_and_no_sample_is_cut():
    """case T10: a packed row has no place for garbage."""
    given = samples(longest=100)
    for micro in pack_tokens(given, 64, share_prefixes=False):
        assert len(micro.token_ids) == sum(row.length for row in micro.rows)
        assert len(micro.token_ids) <= 64 or len(micro.rows) == 1
    shared = pack_tokens(given, 64, share_prefixes=True)
    for micro in [*shared, *pack_tokens(given, 64, share_prefixes=False)]:
        assert torch.equal(micro.token_ids[micro.place], micro.targets)
        assert torch.equal(micro.position_ids[micro.place], micro.column)
    assert sorted(row.episode_id for micro in shared for row in micro.rows) == sorted(s.episode_id for s in given)
    assert sum(len(micro.token_ids) for micro in shared) < sum(s.length for s in given)


def test_a_groups_prompt_is_computed_once():
    """Twelve shared tokens, then 2, 9 and 16 of their own."""
    group = samples()[:3]
    (bundle,) = bundles(group, 100)
    assert bundle.shared == 12
    assert bundle.computed == 12 + 2 + 9 + 16
    (micro,) = pack_tokens(group, 100, share_prefixes=True)
    assert len(micro.token_ids) == 39
    assert Part(12, 39, 0, 12, causal=False) in micro.parts


def test_groups_stay_apart_though_they_begin_alike():
    """A system prompt of ten tokens that two groups share is worth less than each group's own of 30."""
    system, prompts = [3] * 10, ([4] * 20, [5] * 20)
    given = [sample(f"g{g}{m}", [*system, *prompts[g], 6 + m], m) for m in range(3) for g in range(2)]
    assert [(each.shared, len(each.rows)) for each in bundles(given, 1000)] == [(30, 3), (30, 3)]


def test_a_bundle_that_is_too_long_is_split_and_its_prompt_computed_again():
    given = [sample(f"m{n}", [*range(2, 12), 13 + n, 14, 15], n) for n in range(4)]
    assert [each.computed for each in bundles(given, 17)] == [16, 16]
    assert [each.shared for each in bundles(given, 17)] == [10, 10]


def test_samples_that_share_nothing_are_single():
    given = [sample(f"e{n}", [n + 2] * (5 + n), n) for n in range(3)]
    assert [each.shared for each in bundles(given, 100)] == [each.shared for each in singles(given)] == [0, 0, 0]


@pytest.mark.parametrize("length", [1, LEAF, LEAF + 1, 5 * LEAF + 3])
def test_causal_parts_see_every_pair_once(length):
    causal, whole = causal_parts(7, 7 + length)
    seen = np.zeros((length, length), np.int64)
    for part in [*causal, *whole]:
        block = np.ones((part.last - part.first, part.key_last - part.key_first), np.int64)
        seen[part.first - 7 : part.last - 7, part.key_first - 7 : part.key_last - 7] += (
            np.tril(block) if part.causal else block
        )
    assert np.array_equal(seen, np.tril(np.ones((length, length), np.int64)))
    assert all(part.last - part.first <= LEAF for part in causal)


@pytest.mark.parametrize("lengths", [(3, 300, 5), (1, 1, 40)])
def test_attention_and_its_gradient_equal_one_with_a_mask(lengths):
    """A prompt and two continuations, in double precision."""
    prompt, end = lengths[0], sum(lengths)
    spans = [(0, prompt), (prompt, prompt + lengths[1]), (prompt + lengths[1], end)]
    pieces = [causal_parts(*span) for span in spans]
    parts = [part for index in (0, 1) for piece in pieces for part in piece[index]]
    parts.append(Part(prompt, end, 0, prompt, causal=False))
    mask = torch.zeros(end, end, dtype=torch.bool)
    for first, last in spans:
        mask[first:last, first:last] = torch.tril(torch.ones(last - first, last - first)).bool()
    mask[prompt:, :prompt] = True
    torch.manual_seed(0)
    query, key, value, outer = (torch.randn(1, end, 2, 8, dtype=torch.float64).transpose(1, 2) for _ in range(4))
    given = [each.requires_grad_() for each in (query, key, value)]
    expected = torch.nn.functional.scaled_dot_product_attention(*given, attn_mask=mask)
    found = packed_attention(torch.nn.Module(), *given, None, packed_parts=parts)[0].transpose(1, 2)
    torch.testing.assert_close(found, expected)
    for one, other in zip(
        torch.autograd.grad(found, given, outer), torch.autograd.grad(expected, given, outer), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_packed_attention_refuses_what_it_does_not_know():
    query = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match="softcap"):
        packed_attention(torch.nn.Module(), query, query, query, None, packed_parts=[], softcap=30.0)


def test_how_attention_is_computed_is_not_published():
    """The switch of attention stays in this process."""
    backend = TorchBackend(model_of("llama"), LearnerConfig())
    assert backend.why_padded == ""
    assert backend.model.config._attn_implementation == NAME
    assert NAME not in backend.model.config.to_json_string()
    assert NAME.encode() not in backend.weights()["config.json"]


@pytest.mark.parametrize("share", [False, True])
def test_a_step_equals_that_of_a_padding_backend(share):
    """The learner's figures and weights, with an optimizer, over three steps."""
    config = LearnerConfig(microbatch_tokens=64, share_prefixes=share, lr=1e-3)
    one, other = TorchBackend(model_of("qwen3"), config), TorchBackend(model_of("qwen3"), config)
    other._token_logprobs.why_padded = "to compare"
    for _ in range(3):
        packed, padded = (backend.step(samples(), Grpo(GrpoConfig())) for backend in (one, other))
        assert packed.keys() == padded.keys()
        for name, figure in padded.items():
            assert packed[name] == pytest.approx(figure, abs=1e-4, rel=1e-4)
        assert packed.episodes.keys() == padded.episodes.keys()
