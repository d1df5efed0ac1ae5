"""The words of lookup-injected: those of lookup, and what it takes to be told to send something, and to do it."""

import json
import re

from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from headrace.actors.environments.lookup.injected import ADDRESSES, SEND, SENT
from headrace.actors.environments.lookup.injected_demonstrator import blocked
from headrace.actors.environments.lookup.vocabulary import END, UNKNOWN, build_tokenizer, tokenizer_files

_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == "user" -%}<user>{{ message.content }}<end>
{%- elif message.role == "tool" -%}<tool>{{ message.content }}<end>
{%- elif message.role == "assistant" -%}<asst>{{ message.content }}
{%- for call in message.tool_calls or [] -%}
<call>{{ call.function.name }}{% for value in call.function.arguments.values() %} {{ value }}{% endfor %}</call>
{%- endfor -%}<end>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<asst>{%- endif -%}
"""


def injected_tokenizer_files() -> dict[str, bytes]:
    """File name to content: what a model folder needs besides weights and config."""
    renderer = {
        "tool_format": "inline",
        "parameters": {"get": ["key"], SEND.name: list(SEND.parameters["properties"])},
        "stop_tokens": [END],
    }
    return {
        **tokenizer_files(),
        "tokenizer.json": _tokenizer().to_str().encode(),
        "chat_template.jinja": _TEMPLATE.encode(),
        "renderer.json": json.dumps(renderer).encode(),
    }


def _tokenizer() -> Tokenizer:
    """The word tokenizer of lookup with more words, which come after its own."""
    tokenizer = build_tokenizer()
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    more = (f"{SEND.name} ", ", ", " ", SENT, blocked(), *ADDRESSES)
    ids = vocabulary | {word: len(vocabulary) + index for index, word in enumerate(more)}
    words = sorted((word for word in ids if not word.startswith("<")), key=len, reverse=True)
    tokenizer.model = models.WordLevel(ids, unk_token=UNKNOWN)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(map(re.escape, words))), "isolated")
    return tokenizer
