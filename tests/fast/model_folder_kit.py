"""Folders of a tiny Llama as people have them, and a recipe that starts from one."""

import json
from pathlib import Path

import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from headrace.platform.config.load import load_recipe

RECIPES = Path(__file__).resolve().parents[2] / "deploy" / "recipes"
SIZE = {
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
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SIZE, tie_word_embeddings=True)).to(how.pop("dtype", torch.float32))
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


def change_config(folder: Path, **keys) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))


def change_weights(folder: Path, change) -> None:
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", metadata={"format": "pt"})


def recipe(*changes: str):
    return load_recipe("lookup", ["model.tiny_llama=null", "sft=null", *changes], RECIPES)
