"""A recipe's model as a folder that loads, and what is refused with a way out."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers as hf
from command_line import call_main
from model_folder_kit import (
    RECIPES,
    SIZE,
    add_old_tokenizer,
    add_tokenizer,
    change_config,
    change_weights,
    recipe,
    save_model,
)
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch_engine_kit import assert_logprobs, make_engine, manifest, play

from headrace.deploy import model_folder
from headrace.deploy.base_model import cache_folder
from headrace.deploy.checks import check_config
from headrace.deploy.model_folder import model_fingerprint, ready_folder, resolve_model_folder
from headrace.deploy.model_weights import check_weights_fit
from headrace.platform.config.load import load_recipe
from headrace.platform.config.model import ModelConfig
from headrace.platform.errors import ConfigError, EngineError
from headrace.trainer.model import load_folder


@pytest.fixture
def folder(tmp_path) -> Path:
    return add_tokenizer(save_model(tmp_path / "model"))


def test_a_good_folder_is_used_where_it_is(folder, tmp_path):
    model = ModelConfig(path=str(folder))
    assert resolve_model_folder(model, tmp_path / "cache") == folder == ready_folder(model)
    check_config(recipe(f"model.path={folder}"))
    assert not (tmp_path / "cache").exists()


async def test_sharded_half_precision_weights_are_loaded_to_fp32(tmp_path):
    folder = add_tokenizer(save_model(tmp_path / "model", dtype=torch.bfloat16, max_shard_size="10KB"))
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    assert resolve_model_folder(ModelConfig(path=str(folder))) == folder
    check_config(recipe(f"model.path={folder}"))
    model = load_folder(folder)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.generation_config.eos_token_id == [2, 5]
    engine = make_engine()
    await engine.load(manifest(0), str(folder))
    assert_logprobs(str(folder), [await play(engine, "s", 3)], 1.0)
    await engine.close()


def drop_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def pickle_weights(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def lose_a_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    save_model(folder, max_shard_size="10KB")
    min(folder.glob("model-*.safetensors")).unlink()


def quantize(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))


def become_an_adapter(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "some/base"}))
    (folder / "adapter_model.safetensors").write_bytes(b"")


def drop_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def become_mamba(folder: Path) -> None:
    hf.MambaForCausalLM(hf.MambaConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2)).save_pretrained(folder)


def shorten(folder: Path) -> None:
    change_config(folder, max_position_embeddings=64)


def lose_a_layer(folder: Path) -> None:
    change_weights(folder, lambda held: {name: tensor for name, tensor in held.items() if "layers.1" not in name})


def hold_a_layer_too_many(folder: Path) -> None:
    change_config(folder, num_hidden_layers=1)


def name_it_otherwise(folder: Path) -> None:
    change_weights(folder, lambda held: {name.replace("mlp", "ffn"): tensor for name, tensor in held.items()})


def be_of_another_size(folder: Path) -> None:
    change_config(folder, vocab_size=70)


def tear_the_weights(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def empty_the_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def be_of_an_unknown_kind(folder: Path) -> None:
    change_config(folder, model_type="nobody-knows")


def call_itself_an_encoder(folder: Path) -> None:
    change_config(folder, model_type="bert")


def become_an_encoder(folder: Path) -> None:
    size = {key: value for key, value in SIZE.items() if key != "max_position_embeddings"}
    hf.BertForMaskedLM(hf.BertConfig(**size)).save_pretrained(folder)


def become_a_classifier(folder: Path) -> None:
    hf.LlamaForSequenceClassification(hf.LlamaConfig(**SIZE, pad_token_id=0)).save_pretrained(folder)


REFUSED = {
    drop_weights: "holds no weights",
    pickle_weights: r"pickled weights.*convert them once: AutoModelForCausalLM.from_pretrained",
    lose_a_shard: r"lacks model-0.*weight files",
    quantize: r"quantized \(gptq\); training needs those of the original model",
    become_an_adapter: r"an adapter \(PEFT\) of some/base.*merge_and_unload",
    drop_tokenizer: "holds no tokenizer.json, nor an older tokenizer",
    become_mamba: "MambaForCausalLM keeps a recurrent state.*serving.engine=vllm",
    lose_a_layer: r"the weights do not fit config.json: they lack model\.layers\.1\.input_layernorm.* and 6 more",
    hold_a_layer_too_many: r"has no place for model\.layers\.1\.input_layernorm",
    name_it_otherwise: r"they lack model\.layers\.0\.mlp\.down_proj.*they hold model\.layers\.0\.ffn\.down_proj",
    be_of_another_size: r"model\.embed_tokens\.weight is \(61, 32\), not \(70, 32\)",
    tear_the_weights: r"model\.safetensors is torn",
    empty_the_weights: r"model\.safetensors is torn",
    be_of_an_unknown_kind: r"config\.json describes no model of transformers.*nobody-knows",
    call_itself_an_encoder: r"bert \(LlamaForCausalLM\) is no causal language model",
    become_an_encoder: r"bert \(BertForMaskedLM\) is no causal language model",
    become_a_classifier: r"they lack lm_head\.weight; they hold score\.weight instead",
    shorten: r"max_positions=128 is more than the 64 positions.*set environments.lookup.budgets.max_tokens \(now 128\)",
}


@pytest.mark.parametrize("break_it", REFUSED, ids=lambda each: each.__name__)
def test_what_cannot_be_used_is_refused_before_anything_starts(folder, break_it):  # case V4
    break_it(folder)
    with pytest.raises(ConfigError, match=REFUSED[break_it]):
        check_config(recipe(f"model.path={folder}"))


MISFITS = (lose_a_layer, hold_a_layer_too_many, name_it_otherwise, be_of_another_size)


@pytest.mark.parametrize("break_it", MISFITS, ids=lambda each: each.__name__)
async def test_no_part_takes_weights_that_do_not_fit(folder, break_it):  # case S4
    """Whoever hands the folder over, and whatever was checked before: numbers are never made up or left out."""
    break_it(folder)
    with pytest.raises(ConfigError, match=r"model: the weights do not fit config\.json"):
        load_folder(folder)
    engine = make_engine()
    with pytest.raises(EngineError, match="model"):
        await engine.load(manifest(0), str(folder))
    await engine.close()


def tie_and_store_both(held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return held | {"lm_head.weight": held["model.embed_tokens.weight"].clone()}


def leave_out_the_prefix(held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("model."): tensor for name, tensor in held.items()}


def store_rotary_frequencies(held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return held | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}


@pytest.mark.parametrize(
    "change", [tie_and_store_both, leave_out_the_prefix, store_rotary_frequencies], ids=lambda each: each.__name__
)
def test_what_transformers_knows_to_be_of_no_account_is_no_fault(folder, change):
    change_weights(folder, change)
    check_config(recipe(f"model.path={folder}"))
    load_folder(folder)


def _of(**more) -> dict:
    return SIZE | {"num_key_value_heads": 2} | more


FAMILIES = {
    "experts that are merged": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**_of(num_local_experts=4))),
    "names of another style": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=2)),
    "is_decoder without a meaning": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**SIZE)),
    "head width apart": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**_of(head_dim=16))),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_fit_themselves(family, tmp_path):
    FAMILIES[family]().save_pretrained(tmp_path)
    check_weights_fit(tmp_path)
    change_weights(tmp_path, lambda held: dict(sorted(held.items())[:-1]))
    with pytest.raises(ConfigError, match="they lack"):
        check_weights_fit(tmp_path)


@pytest.mark.parametrize("name", ["no-such-folder", "some.gguf"])
def test_a_path_that_is_no_folder_is_refused(tmp_path, name):
    with pytest.raises(
        ConfigError, match=r"is not a Hugging Face folder.*" + ("gguf instead" if "gguf" in name else "")
    ):
        check_config(recipe(f"model.path={tmp_path / name}"))


def test_the_command_line_ends_with_the_reason(folder, monkeypatch, capsys, tmp_path):
    become_mamba(folder)
    monkeypatch.chdir(tmp_path)
    changes = ("model.tiny_llama=null", "sft=null", f"model.path={folder}")
    assert call_main(monkeypatch, "train", "lookup", *changes, "--dry-run") == 2
    assert "MambaForCausalLM" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


# --- preparation ------------------------------------------------------------------------------------------------------


def test_an_old_tokenizer_is_converted_once(tmp_path, monkeypatch):
    source, cache = add_old_tokenizer(save_model(tmp_path / "model")), tmp_path / "cache"
    model = ModelConfig(path=str(source))
    assert ready_folder(model, cache) is None
    prepared = resolve_model_folder(model, cache)
    tokenizer = Tokenizer.from_file(str(prepared / "tokenizer.json"))
    assert tokenizer.encode("abba", add_special_tokens=False).tokens == ["ab", "b", "a"]
    assert torch.equal(load_folder(prepared).lm_head.weight, load_folder(source).lm_head.weight)
    monkeypatch.setattr(model_folder, "_convert_tokenizer", lambda *_: pytest.fail("it was converted already"))
    assert resolve_model_folder(model, cache) == prepared == ready_folder(model, cache)
    assert [path.name for path in cache.iterdir()] == [prepared.name]
    assert not (source / "tokenizer.json").exists(), "the source is left as it was"


def test_another_file_is_another_preparation(tmp_path):
    source = add_old_tokenizer(save_model(tmp_path / "model"))
    before = model_fingerprint(ModelConfig(path=str(source)))
    (source / "vocab.json").write_text((source / "vocab.json").read_text() + "\n")
    assert model_fingerprint(ModelConfig(path=str(source))) != before


def test_supervised_stages_are_cached_by_the_files_that_they_start_from(folder):
    config = load_recipe("lookup", ["model.tiny_llama=null", f"model.path={folder}"], RECIPES)
    before = cache_folder(config)
    (folder / "tokenizer_config.json").write_text("{}")
    assert cache_folder(config) != before


def test_a_preparation_that_fails_leaves_nothing(tmp_path):
    source, cache = add_old_tokenizer(save_model(tmp_path / "model")), tmp_path / "cache"
    (source / "vocab.json").write_text("torn")
    with pytest.raises(ConfigError, match=r"model cannot be prepared"):
        resolve_model_folder(ModelConfig(path=str(source)), cache)
    assert list(cache.iterdir()) == []


def test_a_faster_process_is_welcome(tmp_path, monkeypatch):
    source, cache = add_old_tokenizer(save_model(tmp_path / "model")), tmp_path / "cache"
    convert = model_folder._convert_tokenizer

    def overtaken(folder: Path, target: Path) -> None:
        convert(folder, target)
        shutil.copytree(target, cache / model_fingerprint(ModelConfig(path=str(source)))[:24])

    monkeypatch.setattr(model_folder, "_convert_tokenizer", overtaken)
    prepared = resolve_model_folder(ModelConfig(path=str(source)), cache)
    assert [path.name for path in cache.iterdir()] == [prepared.name]
