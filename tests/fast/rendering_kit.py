"""Folders of small models that talk as known families do: a byte-level tokenizer with their special tokens, and
templates for the families that need one.

No word is learned but a few that show whether texts are encoded across a seam, so every id can be read.
"""

import functools
import json
import tempfile
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from headrace.actors.rendering import load_renderer
from headrace.actors.rendering.tool_formats.deepseek import bar_token
from headrace.platform.contracts import Renderer
from headrace.platform.records import Message, Role, ToolCall, ToolSpec

MERGES = [("t", "o"), ("e", "r"), ("Ċ", "Ċ"), ("Ġ", "to"), ("u", "s")]
# Tags that real vocabularies add without calling them special.
PLAIN_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", *PLAIN_TAGS)
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
LLAMA = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|python_tag|>",
)
DEEPSEEK = tuple(
    bar_token(name)
    for name in (
        "begin of sentence",
        "end of sentence",
        "User",
        "Assistant",
        "tool calls begin",
        "tool calls end",
        "tool call begin",
        "tool call end",
        "tool sep",
        "tool outputs begin",
        "tool outputs end",
        "tool output begin",
        "tool output end",
    )
)
HARMONY = ("<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|channel|>", "<|message|>", "<|constrain|>")
TOKENS = {
    "qwen3": CHATML,
    "qwen3-coder": CHATML,
    "qwen3.5": (*CHATML, *VISION),
    "llama-3": LLAMA,
    "deepseek-v3": DEEPSEEK,
    "deepseek-r1": DEEPSEEK,
    "gpt-oss": HARMONY,
}
ALL_MARKERS = tuple(dict.fromkeys(token for tokens in TOKENS.values() for token in tokens))

# The shape of the harmony format: one call a turn, whose tool the result names; what is thought stays until an answer
# follows; contents of tools are quoted; the last answer is shown as it was sampled.
HARMONY_TEMPLATE = """\
{%- set last = namespace(name=none) -%}
<|start|>system<|message|>Current date: {{ strftime_now("%Y-%m-%d") }}<|end|>
{%- if tools -%}
<|start|>developer<|message|># Tools
{% for tool in tools %}{{ tool.function | tojson }}
{% endfor %}<|end|>
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == "assistant" and message.tool_calls -%}
{%- if message.content and message.thinking %}{{ raise_exception("content and thinking beside a call") }}{% endif -%}
{%- set answers = messages[loop.index:] | selectattr("role", "equalto", "assistant") | rejectattr("tool_calls") -%}
{%- if message.thinking and not answers | list -%}
<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>
{%- endif -%}
{%- set call = message.tool_calls[0].function -%}
<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>
{{- call.arguments | tojson }}<|call|>
{%- set last.name = call.name -%}
{%- elif message.role == "assistant" -%}
{%- set speaks_last = loop.last and not add_generation_prompt -%}
{%- if speaks_last and message.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>
{%- endif -%}
<|start|>assistant<|channel|>final<|message|>{{ message.content }}{{ "<|return|>" if speaks_last else "<|end|>" }}
{%- elif message.role == "tool" -%}
{%- if last.name is none %}{{ raise_exception("a result without a call") }}{% endif -%}
<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>{{ message.content | tojson }}<|end|>
{%- else -%}
<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
"""

SUM = ToolSpec("sum", "Add numbers.", {"type": "object", "properties": {"terms": {"type": "array"}}})
SYSTEM, USER, MORE = (
    Message(Role.SYSTEM, "Be brief."),
    Message(Role.USER, "What is 1 + 1?"),
    Message(Role.USER, "And 2 + 2?"),
)


def called(*terms: list[int], content: str = "", reasoning: str = "") -> Message:
    """A turn that calls `sum` once for each of `terms`."""
    calls = tuple(ToolCall("sum", {"terms": numbers}, f"call_{index}") for index, numbers in enumerate(terms))
    return Message(Role.ASSISTANT, content, reasoning, calls)


def said(content: str, reasoning: str = "") -> Message:
    return Message(Role.ASSISTANT, content, reasoning)


def result(content: str, index: int = 0) -> Message:
    return Message(Role.TOOL, content, tool_call_id=f"call_{index}")


def family_tokenizer(special=ALL_MARKERS) -> Tokenizer:
    """A byte-level BPE tokenizer with these markers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *("".join(pair) for pair in MERGES)]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(t, special=t not in PLAIN_TAGS, normalized=False) for t in special])
    return tokenizer


def write_folder(folder: Path, special=ALL_MARKERS, template: str | None = None, **files) -> Path:
    """A model folder; `renderer={…}` becomes renderer.json, and so on."""
    (folder / "tokenizer.json").write_text(family_tokenizer(special).to_str())
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@functools.cache
def family_renderer(family: str, **template_args) -> Renderer:
    """The renderer of a family, on a vocabulary that has the markers of every family."""
    settings = {"family": family, "template_args": template_args}
    template = None
    if family == "gpt-oss":
        template, settings["stop_tokens"] = HARMONY_TEMPLATE, ["<|return|>", "<|call|>"]
    with tempfile.TemporaryDirectory() as folder:
        return load_renderer(write_folder(Path(folder), template=template, renderer=settings))


def marker_ids(renderer: Renderer) -> dict[int, str]:
    tokenizer = family_tokenizer()
    return {tokenizer.token_to_id(marker): marker for marker in ALL_MARKERS}


def sampled(text: str) -> list[int]:
    """Ids that a model samples to say `text`."""
    return family_tokenizer().encode(text, add_special_tokens=False).ids
