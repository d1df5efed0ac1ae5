"""Attention in parts of similar length gives what the model gives by itself."""

import numpy as np
import pytest
import torch
from torch_engine_kit import FAMILIES, VOCABULARY
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from headrace.serving.batch import ROW
from headrace.serving.forward import ModelRunner, parts
from headrace.serving.kv_slots import Part
from headrace.serving.model_loader import check_attention
from headrace.serving.slot_attention import NAME, attention_of, use_slot_attention
from headrace.serving.slot_table import SlotTable

ROWS, LONGEST = 37, 30
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
}


def windowed() -> MistralForCausalLM:
    return MistralForCausalLM(MistralConfig(sliding_window=5, **SMALL))


def spread(model):
    """Logits far enough apart for wrong ones to show."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.25)
    return model.eval()


class Deaf(LlamaForCausalLM):
    """Takes whatever it is told, and does not tell its layers."""

    def forward(self, *args, slot_step=None, **kwargs):
        return super().forward(*args, **kwargs)


class Narrow(LlamaForCausalLM):
    """Takes only what it knows."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None):
        return super().forward(input_ids, attention_mask, position_ids, past_key_values, use_cache=use_cache)


def test_parts_are_all_rows_in_order_each_as_long_as_its_longest():
    positions = np.arange(19) * 2
    assert parts(positions) == [Part(slice(0, 8), 15), Part(slice(8, 16), 31), Part(slice(16, 19), 37)]
    assert parts(np.array([7])) == [Part(slice(0, 1), 8)]
    assert parts(np.zeros(8, np.int64)) == [Part(slice(0, 8), 1)]


@pytest.mark.parametrize("build", [*FAMILIES.values(), windowed], ids=[*FAMILIES, "window"])
def test_more_rows_than_a_part_holds_get_the_logits_of_a_plain_forward_pass(build):
    torch.manual_seed(3)
    model = spread(build())
    dice = np.random.default_rng(4)
    table = SlotTable(ROWS, LONGEST + 2)
    table.ids[1:] = dice.integers(0, VOCABULARY, table.ids[1:].shape)
    with torch.inference_mode():
        plain = model(input_ids=torch.from_numpy(table.ids[1:].astype(np.int64)), use_cache=False).logits.numpy()
    assert use_slot_attention(model)
    runner, rows = ModelRunner(table), np.zeros(ROWS, ROW)
    rows["slot"] = 1 + dice.permutation(ROWS)
    lengths = dice.integers(1, LONGEST - 8, ROWS)
    # A prefill of unequal lengths; a decoding step; rows that decode beside rows that have seen an observation.
    for more in (np.zeros(ROWS, np.int64), np.ones(ROWS, np.int64), dice.integers(1, 9, ROWS)):
        lengths = lengths + more
        rows["position"] = lengths - 1
        found = runner.logits(model, rows)
        table.cached[rows["slot"]] = lengths
        np.testing.assert_allclose(found, plain[rows["slot"] - 1, lengths - 1], atol=1e-4)


def test_a_model_that_does_not_hand_the_step_on_keeps_its_own_attention():
    model = spread(Deaf(LlamaConfig(**SMALL)))
    check_attention(model)
    assert attention_of(model) == "sdpa"


def test_a_model_that_takes_nothing_more_keeps_its_own_attention():
    assert not use_slot_attention(Narrow(LlamaConfig(**SMALL)))


def test_eager_attention_stays_eager():
    model = LlamaForCausalLM(LlamaConfig(attn_implementation="eager", **SMALL))
    assert not use_slot_attention(model)
    assert attention_of(model) == "eager"


def test_a_common_model_uses_it():
    model = spread(LlamaForCausalLM(LlamaConfig(**SMALL)))
    check_attention(model)
    assert attention_of(model) == NAME
