"""The 144 words of the lookup world, as the tokenizer files of a Hugging Face folder.

One token per key and per value keeps the copying skill learnable in seconds. `<unk>` doubles as padding.
"""

import json

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

KEYS = tuple(f"k{i:02d}" for i in range(32))
VALUES = tuple(f"v{i:02d}" for i in range(100))
UNKNOWN, END = "<unk>", "<end>"
_MARKERS = (UNKNOWN, END, "<user>", "<asst>", "<tool>", "<call>", "</call>")
_WORDS = ("find ", "get ", "=@", "=", "?")
_SPLIT = r"find |get |=@|=|\?|k\d\d|v\d\d"

_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == "user" -%}<user>{{ message.content }}<end>
{%- elif message.role == "tool" -%}<tool>{{ message.content }}<end>
{%- elif message.role == "assistant" -%}<asst>{{ message.content }}
{%- for call in message.tool_calls or [] -%}<call>{{ call.function.name }} {{ call.function.arguments.key }}</call>
{%- endfor -%}<end>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<asst>{%- endif -%}
"""


def build_tokenizer() -> Tokenizer:
    """The word tokenizer: 144 entries; whatever it does not know becomes `<unk>`."""
    words = [*_MARKERS, *_WORDS, *KEYS, *VALUES]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_SPLIT), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in _MARKERS])
    return tokenizer


def tokenizer_files() -> dict[str, bytes]:
    """File name to content: what a model folder needs besides weights and config."""
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": UNKNOWN,
        "unk_token": UNKNOWN,
    }
    renderer = {"tool_format": "inline", "parameters": {"get": ["key"]}, "stop_tokens": [END]}
    return {
        "tokenizer.json": build_tokenizer().to_str().encode(),
        "tokenizer_config.json": json.dumps(tokenizer_config).encode(),
        "chat_template.jinja": _TEMPLATE.encode(),
        "renderer.json": json.dumps(renderer).encode(),
    }
