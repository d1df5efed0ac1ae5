"""Vocabularies and a chat template for tiny models that have to learn any text from random weights.

Owns what a tiny model's folder needs besides weights and config. The template is ChatML with Hermes tool calls. It
writes every message as it is and strips nothing, so that bridges are exact (case T3). The words of the protocol are
single tokens, because boilerplate that a tiny model has to spell costs it minutes. Word lists that belong to one
environment, as that of `lookup`, lie with it.
"""

import json
from collections.abc import Callable, Sequence
from difflib import get_close_matches

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from headrace.platform.errors import ConfigError

END, PADDING = "<|im_end|>", "<|pad|>"
_ROLES = ("system", "user", "assistant", "tool")
# Markers of the conversation: no text from outside may become one of them (case T5).
_MARKERS = (PADDING, END, *(f"<|im_start|>{role}\n" for role in _ROLES))
# The fixed parts of a tool call, which a model samples. As in Qwen's tokenizers they are not declared special.
_CALL_PARTS = ('<tool_call>{"name": "', '", "arguments": {', "</tool_call>")
_BYTES = 256
# Letters of a word, one digit, blanks, or other signs: a word is the same token wherever it stands, and digits are
# told apart, which copying and arithmetic need.
_PIECES = r"\p{L}+|\p{N}|\s+|[^\s\p{L}\p{N}]+"

_TEMPLATE = """\
{%- set ns = namespace(system="") -%}
{%- if messages and messages[0].role == "system" -%}{%- set ns.system = messages[0].content -%}{%- endif -%}
{%- if ns.system or tools -%}
{{- "<|im_start|>system\\n" + ns.system -}}
{%- if ns.system and tools -%}{{- "\\n" -}}{%- endif -%}
{%- for tool in tools or [] -%}
{{- tool.function.name + "(" -}}
{%- for name, schema in ((tool.function.parameters or {}).get("properties") or {}).items() -%}
{{- name + ": " + (schema.get("type") or "any") | string -}}{%- if not loop.last -%}{{- ", " -}}{%- endif -%}
{%- endfor -%}
{{- ")" -}}{%- if not loop.last -%}{{- "\\n" -}}{%- endif -%}
{%- endfor -%}
{{- "<|im_end|>\\n" -}}
{%- endif -%}
{%- for message in messages -%}
{%- if not (loop.first and message.role == "system") -%}
{{- "<|im_start|>" + message.role + "\\n" -}}
{%- if message.reasoning_content -%}{{- "<think>" + message.reasoning_content + "</think>" -}}{%- endif -%}
{{- message.content or "" -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' -}}
{{- call.function.arguments | tojson -}}{{- "}</tool_call>" -}}
{%- endfor -%}
{{- "<|im_end|>\\n" -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\\n" -}}{%- endif -%}
"""


def vocabulary_files(kind: str, texts: Sequence[str], size: int) -> dict[str, bytes]:
    """File name to content: tokenizer, chat template and renderer settings of a tiny model's folder.

    Args:
        kind: `bytes`: every byte is a token, and `texts` and `size` are not looked at. `trained`: byte-level BPE, with
            merges learned from `texts`; the same texts in the same order give the same vocabulary.
        texts: what the model will read and write, such as the contents of chats and the JSON of tool calls.
        size: entries at most, markers included.

    Raises:
        ConfigError: for an unknown kind, a size without room for all bytes and markers, or no text to learn from.
    """
    if kind not in _KINDS:
        near = get_close_matches(kind, _KINDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(_KINDS)}"
        raise ConfigError(f"model.tiny_llama.vocabulary: there is no vocabulary {kind!r}; {hint}")
    tokenizer = _KINDS[kind](texts, size)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in _MARKERS])
    tokenizer.add_tokens([AddedToken(part, special=False, normalized=False) for part in _CALL_PARTS])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": PADDING}
    renderer = {"family": "template", "tool_format": "hermes", "stop_tokens": [END]}
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
        "chat_template.jinja": _TEMPLATE.encode(),
        "renderer.json": json.dumps(renderer).encode(),
    }


def _byte_vocabulary(texts: Sequence[str], size: int) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return tokenizer


def _trained_vocabulary(texts: Sequence[str], size: int) -> Tokenizer:
    words = size - len(_MARKERS) - len(_CALL_PARTS)
    if words < _BYTES:
        least = _BYTES + len(_MARKERS) + len(_CALL_PARTS)
        raise ConfigError(f"model.tiny_llama.vocabulary_size={size} has no room for all bytes; use {least} or more")
    if not any(texts):
        raise ConfigError(
            "model.tiny_llama.vocabulary='trained' learns its words from the chats of the recipe's `sft` stages, and"
            " there are none; give a stage `data`, or use vocabulary: bytes"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=words,
        min_frequency=2,
        show_progress=False,
        special_tokens=[],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


_KINDS: dict[str, Callable[[Sequence[str], int], Tokenizer]] = {
    "bytes": _byte_vocabulary,
    "trained": _trained_vocabulary,
}
