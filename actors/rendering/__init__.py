"""Renderers: messages to tokens and back. `load_renderer` finds the right one for a model folder."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from headrace.actors.rendering.template import TemplateRenderer
from headrace.actors.rendering.tool_formats import build_tool_format
from headrace.platform.contracts import Renderer
from headrace.platform.errors import ConfigError

__all__ = ["load_renderer"]


def load_renderer(model_dir: str | Path) -> Renderer:
    """The renderer for a Hugging Face folder.

    Reads `tokenizer.json`, `chat_template.jinja` and, where present, `renderer.json` with `tool_format` (default
    "hermes"), `parameters` and `stop_tokens` (default: the tokenizer's end-of-sequence token).

    Raises:
        ConfigError: when the folder lacks a tokenizer, a template or a stop token.
    """
    folder = Path(model_dir)
    for name in ("tokenizer.json", "chat_template.jinja"):
        if not (folder / name).is_file():
            raise ConfigError(f"the model folder {folder} has no {name}; headrace needs one to talk to the model")
    settings = _read_json(folder / "renderer.json")
    end_token = _read_json(folder / "tokenizer_config.json").get("eos_token")
    stop_tokens = settings.get("stop_tokens") or ([end_token] if isinstance(end_token, str) else [])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if not stop_tokens or any(tokenizer.token_to_id(token) is None for token in stop_tokens):
        raise ConfigError(
            f"{folder}: the stop tokens {stop_tokens} are not in the vocabulary; name some in renderer.json"
        )
    tool_format = build_tool_format(settings.get("tool_format", "hermes"), settings.get("parameters", {}))
    template = (folder / "chat_template.jinja").read_text()
    return TemplateRenderer(tokenizer, template, tool_format, stop_tokens)


def _read_json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.is_file() else {}
