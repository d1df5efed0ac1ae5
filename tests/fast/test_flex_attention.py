"""Packed rows through flex attention: who sees whom, and the same results as each sample by itself.

Its kernels are for GPUs; here torch computes the same function by plain products, forwards only.
"""

import warnings

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from headrace.platform.records import f32, i32
from headrace.trainer.flex_attention import NAME, block_mask, flex_attention, spans
from headrace.trainer.packed_attention import LEAF, Part, causal_parts
from headrace.trainer.packing import PackedBatch, pack_tokens
from headrace.trainer.packing_support import use_packed_attention
from headrace.trainer.samples import Sample

VOCABULARY = 40
CPU = torch.device("cpu")


def samples(lengths: list[int], prompt: int) -> list[Sample]:
    """With `prompt` tokens in common."""
    rng = np.random.default_rng(0)
    begin = rng.integers(1, VOCABULARY, prompt)
    return [
        Sample(
            episode_id=f"run.t0.{n}.0",
            agent_id="",
            segment=0,
            lag=0,
            token_ids=i32([*begin, *rng.integers(1, VOCABULARY, length)]),
            action_mask=np.ones(prompt + length, np.uint8),
            loss_mask=np.ones(prompt + length, np.uint8),
            behaviour_logprobs=f32(np.zeros(prompt + length)),
            advantages=f32(np.zeros(prompt + length)),
            temperatures=f32(np.ones(prompt + length)),
        )
        for n, length in enumerate(lengths)
    ]


def pairs(parts: tuple[Part, ...], length: int) -> np.ndarray:
    """Who sees whom, part by part: bool[S, S]."""
    sees = np.zeros((length, length), bool)
    for part in parts:
        block = np.ones((part.last - part.first, part.key_last - part.key_first), bool)
        sees[part.first : part.last, part.key_first : part.key_last] |= np.tril(block) if part.causal else block
    return sees


LAYOUTS = {
    "one sample": pack_tokens(samples([9], 0), 1000, True),
    "apart": pack_tokens(samples([5, 9, 3], 0), 1000, False),
    "a prompt in common": pack_tokens(samples([5, 9, 3], 6), 1000, True),
    "long": pack_tokens(samples([2 * LEAF + 7, LEAF + 1, 40], LEAF + 30), 10_000, True),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_mask_says_what_the_parts_say(name: str) -> None:  # case T10
    (batch,) = LAYOUTS[name]
    length = len(batch.token_ids)
    own, first, last = spans(batch.parts, length)
    query, key = np.arange(length)[:, None], np.arange(length)[None, :]
    wanted = pairs(batch.parts, length)
    assert (wanted == (((key <= query) & (key >= own[query])) | ((key >= first[query]) & (key < last[query])))).all()
    blocks = block_mask(batch.parts, length, CPU)
    assert blocks.shape == (1, 1, length, length)
    seen = blocks.to_dense()[0, 0].bool().repeat_interleave(128, 0).repeat_interleave(128, 1)[:length, :length].numpy()
    assert not (wanted & ~seen).any(), "a block that somebody sees is left out"


def test_spans_by_hand() -> None:
    """A prompt of two tokens, continued by one and by two."""
    parts = (*causal_parts(0, 2)[0], *causal_parts(2, 3)[0], *causal_parts(3, 5)[0], Part(2, 5, 0, 2, causal=False))
    own, first, last = spans(parts, 5)
    assert own.tolist() == [0, 0, 0, 3, 3]
    assert first.tolist() == [0, 0, 0, 0, 0]
    assert last.tolist() == [0, 0, 0, 2, 2]


@pytest.fixture
def model():
    torch.manual_seed(3)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**shape, num_key_value_heads=2, vocab_size=VOCABULARY, initializer_range=0.3)
    made = LlamaForCausalLM(config).eval()
    ALL_ATTENTION_FUNCTIONS.register(NAME, flex_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
    made.set_attn_implementation(NAME)
    return made


@torch.no_grad()
def hidden(model, batch: PackedBatch) -> torch.Tensor:
    """The last hidden states of the row, computed without compiling anything."""
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*flex_attention called without torch.compile.*")
        warnings.filterwarnings(
            "ignore", r".*torch\.jit\.script_method.*", DeprecationWarning
        )  # torch's compiler, of torch
        return model.base_model(
            input_ids=batch.token_ids[None],
            position_ids=batch.position_ids[None],
            attention_mask=torch.zeros((1, 1, 1, 1), dtype=torch.bool),
            packed_mask=block_mask(batch.parts, len(batch.token_ids), CPU),
            use_cache=False,
        ).last_hidden_state[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_packed_sample_is_as_it_is_alone(name: str, model) -> None:  # case T10
    (batch,) = LAYOUTS[name]
    packed = hidden(model, batch)[batch.place]
    with torch.no_grad():
        alone = [
            model.base_model(input_ids=torch.tensor(row.token_ids.tolist())[None], use_cache=False).last_hidden_state[0]
            for row in batch.rows
        ]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-4, atol=1e-5)


def test_autocast_reaches_queries_and_keys(model) -> None:
    (batch,) = LAYOUTS["apart"]
    with torch.autocast("cpu", torch.bfloat16):
        low = hidden(model, batch)
    high = hidden(model, batch)
    assert 0 < float((low - high).abs().mean() / high.abs().mean()) < 0.05


def test_more_than_plain_attention_is_refused() -> None:
    query = torch.zeros(1, 2, 4, 8)
    blocks = block_mask(tuple(causal_parts(0, 4)[0]), 4, CPU)
    with pytest.raises(ValueError, match="packed attention knows no sliding_window"):
        flex_attention(nn.Identity(), query, query, query, None, packed_mask=blocks, sliding_window=2)


def test_a_device_that_has_no_packed_attention_is_named() -> None:
    made = LlamaForCausalLM(LlamaConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=9))
    assert use_packed_attention(made.to("meta")) == "there is no attention for packed rows on 'meta'"
    assert made.config._attn_implementation == "sdpa"
