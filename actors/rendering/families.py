"""Families of models that are rendered by the library `renderers`, without a template.

A folder belongs to a family because its `renderer.json` says so, or because its tokens are those of the family and its
own chat template writes the same prompts. In doubt the template is right. The library costs a second to import (it
brings an HTTP client along), so that is left until a folder needs it.
"""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headrace.actors.rendering.checks import CONVERSATIONS, THOUGHT, USER
from headrace.actors.rendering.family import FamilyRenderer
from headrace.actors.rendering.library_tokenizer import LibraryTokenizer
from headrace.actors.rendering.model_folder import ModelFolder
from headrace.actors.rendering.template import TemplateRenderer
from headrace.actors.rendering.tool_formats import build_tool_format
from headrace.actors.rendering.tool_formats.deepseek import bar_token
from headrace.platform.errors import ConfigError
from headrace.platform.records.message import Message
from headrace.platform.records.status import Role


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """How a family is rendered and read. Its `tokens` are in no other family's vocabulary all together; `thinks` says
    whether its prompts have a place for thoughts."""

    renderer: str
    tool_format: str
    thinks: bool
    tokens: tuple[str, ...]
    model_types: frozenset[str]
    takes_date: bool = False


_CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>", "</tool_call>", "<tool_response>", "</think>")
_BARS = tuple(bar_token(name) for name in ("User", "Assistant", "end of sentence", "tool calls begin", "tool sep"))
FAMILIES = {
    "qwen3": Family(
        renderer="Qwen3",
        tool_format="hermes",
        thinks=True,
        tokens=_CHATML,
        model_types=frozenset({"qwen3", "qwen3_moe"}),
    ),
    # The library names its renderer of the Qwen3-Coder template after another model that shares it.
    "qwen3-coder": Family(
        renderer="PrimeQwen3",
        tool_format="qwen3-coder",
        thinks=False,
        tokens=_CHATML,
        model_types=frozenset({"qwen3", "qwen3_moe"}),
    ),
    "qwen3.5": Family(
        renderer="Qwen35",
        tool_format="qwen3-coder",
        thinks=True,
        tokens=(*_CHATML, "<think>", "<|vision_start|>", "<|image_pad|>"),
        model_types=frozenset({"qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text"}),
    ),
    "llama-3": Family(
        renderer="Llama3",
        tool_format="llama-3",
        thinks=False,
        tokens=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
        model_types=frozenset({"llama"}),
        takes_date=True,
    ),
    "deepseek-v3": Family(
        renderer="DeepSeekV3",
        tool_format="deepseek",
        thinks=False,
        tokens=_BARS,
        model_types=frozenset({"deepseek_v3"}),
    ),
    "deepseek-r1": Family(
        renderer="DeepSeekR1",
        tool_format="deepseek",
        thinks=True,
        tokens=_BARS,
        model_types=frozenset({"deepseek_v3"}),
    ),
}
# Rendered by the folder's own template: the library wants a vocabulary from the network for gpt-oss, with its own ids.
TEMPLATE_FAMILIES = {"template": "", "gpt-oss": "gpt-oss"}


def candidates(folder: ModelFolder) -> Iterator[str]:
    """Families whose tokens this folder's vocabulary has, and whose models say that they are of its type."""
    for name, family in FAMILIES.items():
        if folder.model_type and folder.model_type not in family.model_types:
            continue
        if all(folder.tokenizer.token_to_id(token) is not None for token in family.tokens):
            yield name


def build_family(name: str, folder: ModelFolder) -> FamilyRenderer:
    """The renderer of a family for this folder's vocabulary.

    Raises:
        ConfigError: when the vocabulary lacks a token of the family or a stop token, or there is no such setting.
    """
    family = FAMILIES[name]
    settings: dict[str, Any] = dict(folder.settings.template_args)
    if family.takes_date:
        settings = {"date_string": folder.settings.date.strftime("%d %b %Y"), **settings}
    tokenizer = LibraryTokenizer(folder.tokenizer)
    library = importlib.import_module("renderers")
    try:
        config = getattr(library, f"{family.renderer}RendererConfig")(**settings)
        inner = getattr(library, f"{family.renderer}Renderer")(tokenizer, config)
        stop_token_ids = [tokenizer.known_id(token) for token in folder.settings.stop_tokens]
    except (AssertionError, TypeError, ValueError) as error:
        cause = " ".join(str(error).split())
        raise ConfigError(f"{folder.path} cannot be rendered as {name}: {cause}") from error
    prompt = tokenizer.decode(inner.render_ids([{"role": "user", "content": "u"}], add_generation_prompt=True))
    opened = prompt.rstrip().endswith("<think>")
    return FamilyRenderer(
        folder.tokenizer,
        inner,
        build_tool_format(family.tool_format, {}, thinks=family.thinks, opened=opened),
        stop_token_ids=stop_token_ids or inner.get_stop_token_ids(),
        thinks=family.thinks,
        opened=opened,
        settings=[name, library.__version__, settings],
    )


def writes_the_same(family: FamilyRenderer, template: TemplateRenderer) -> bool:
    """Whether both make the same text, or both none, of the conversations that agents have. A family that does not
    think never has thoughts to render."""
    earlier_thought = (USER, Message(Role.ASSISTANT, "answer", THOUGHT), USER)
    conversations = [*((messages, tools) for messages, tools, _ in CONVERSATIONS.values()), (earlier_thought, ())]
    return all(
        _text(family, messages, tools) == _text(template, messages, tools)
        for messages, tools in conversations
        if family.thinks or not any(message.reasoning for message in messages)
    )


def _text(renderer: FamilyRenderer | TemplateRenderer, messages: Any, tools: Any) -> str | None:
    try:
        return renderer.decode(renderer.render(messages, tools))
    except ConfigError:
        return None
