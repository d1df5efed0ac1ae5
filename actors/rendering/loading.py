"""Which renderer a model folder gets: that of its family, or its own chat template, checked."""

import logging
from pathlib import Path
from typing import TypeVar

from headrace.actors.rendering.chat_template import ChatTemplate
from headrace.actors.rendering.checks import what_it_cannot_do
from headrace.actors.rendering.families import (
    FAMILIES,
    TEMPLATE_FAMILIES,
    build_family,
    candidates,
    writes_the_same,
)
from headrace.actors.rendering.model_folder import ModelFolder, read_model_folder
from headrace.actors.rendering.template import TemplateRenderer
from headrace.actors.rendering.tool_formats import build_tool_format, tool_format_of
from headrace.platform.contracts import Renderer
from headrace.platform.errors import ConfigError

_log = logging.getLogger(__name__)
R = TypeVar("R", bound=Renderer)


def load_renderer(model_dir: str | Path) -> Renderer:
    """The renderer for a Hugging Face folder.

    `renderer.json` may name a family: deepseek-r1, deepseek-v3, gpt-oss, llama-3, qwen3, qwen3-coder, qwen3.5, or
    template for the folder's own chat template. Without it, a family is taken when the vocabulary has its tokens and
    the chat template writes the same prompts as it; all else is rendered by the template. See `RendererSettings` for
    what else `renderer.json` may say.

    Raises:
        ConfigError: when the folder lacks a tokenizer, a template that renders a user's message, or a stop token.
    """
    folder = read_model_folder(Path(model_dir))
    name = folder.settings.family
    if name in FAMILIES:
        return _checked(folder, build_family(name, folder))
    if name and name not in TEMPLATE_FAMILIES:
        known = ", ".join(sorted([*FAMILIES, *TEMPLATE_FAMILIES]))
        raise ConfigError(f"{folder.path / 'renderer.json'}: unknown family {name!r}; known: {known}")
    template = _checked_template(folder, TEMPLATE_FAMILIES.get(name, ""))
    if name or folder.settings.tool_format:
        return template
    for candidate in candidates(folder):
        try:
            family = build_family(candidate, folder)
        except ConfigError:  # a setting that it does not have, or a token
            continue
        if writes_the_same(family, template):
            return family
    return template


def _checked(folder: ModelFolder, renderer: R) -> R:
    """The renderer, once it has shown what it can do."""
    for what, cause in what_it_cannot_do(renderer).items():
        _log.info("%s and %s: %s", folder.path, what, cause)
    return renderer


def _checked_template(folder: ModelFolder, tool_format: str) -> TemplateRenderer:
    """The checked renderer of the folder's own template."""
    settings, vocabulary = folder.settings, folder.tokenizer.token_to_id
    if not folder.template:
        raise ConfigError(
            f"the model folder {folder.path} has no chat_template.jinja, nor a template in tokenizer_config.json or"
            " chat_template.json; add one, or name the model's family in renderer.json"
        )
    if not folder.stop_tokens or any(vocabulary(token) is None for token in folder.stop_tokens):
        raise ConfigError(
            f"{folder.path}: the stop tokens {list(folder.stop_tokens)} are not in the vocabulary; name some in"
            " renderer.json"
        )
    variables = {**folder.special_tokens, **settings.template_args}
    kind = settings.tool_format or tool_format or tool_format_of(folder.template)
    try:
        prompt = ChatTemplate(folder.template, variables, settings.date).apply([{"role": "user", "content": "u"}], ())
        opened = prompt.rstrip().endswith("<think>")
        reader = build_tool_format(kind, settings.parameters, opened=opened)
        renderer = TemplateRenderer(
            folder.tokenizer, folder.template, reader, folder.stop_tokens, variables, settings.date
        )
        return _checked(folder, renderer)
    except ConfigError as error:
        raise ConfigError(f"the model folder {folder.path} cannot be talked to: {error}") from error
