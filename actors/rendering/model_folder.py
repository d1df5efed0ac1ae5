"""What a Hugging Face folder says about talking to its model.

Read here and nowhere else: the tokenizer, the chat template and where it may lie, names of special tokens, what ends a
turn, and headrace's own `renderer.json`. Which renderer follows from it is decided elsewhere.
"""

import datetime
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from headrace.actors.rendering.chat_template import DEFAULT_DAY
from headrace.platform.errors import ConfigError

# A template for tools comes first: agents are what headrace is for, and it serves conversations without tools as well.
_TEMPLATE_NAMES = ("tool_use", "default")
# What the library of tokenizers takes for an id.
_MOST_IDS = 2**32
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class RendererSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`renderer.json`: what a folder's own files do not say. Every key is optional.

    `family` names a renderer or "template"; `tool_format` and `parameters` are for the template (see
    `build_tool_format`); `stop_tokens` end a turn; `template` chooses among named templates; `template_args` are
    settings of the template or family, such as enable_thinking; `date` (YYYY-MM-DD) is what a prompt takes for today.
    """

    family: str = ""
    tool_format: str = ""
    parameters: dict[str, list[str]] = {}
    stop_tokens: list[str] = []
    template: str = ""
    template_args: dict[str, Any] = {}
    date: datetime.date = DEFAULT_DAY


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFolder:
    """A model's files, read. `template` is empty where there is none; `special_tokens` maps bos_token and the like."""

    path: Path
    tokenizer: Tokenizer
    template: str
    special_tokens: Mapping[str, str]
    stop_tokens: tuple[str, ...]
    model_type: str
    settings: RendererSettings


def read_model_folder(path: Path) -> ModelFolder:
    """Read `path`.

    Raises:
        ConfigError: for a missing tokenizer or a file that cannot be read; the message names it.
    """
    if not (path / "tokenizer.json").is_file():
        raise ConfigError(f"the model folder {path} has no tokenizer.json; headrace needs one to talk to the model")
    settings = _settings(path / "renderer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    except Exception as error:  # the library has no type of its own for it
        raise ConfigError(f"{path / 'tokenizer.json'} cannot be read: {error}") from error
    special_tokens = _special_tokens(path)
    return ModelFolder(
        path=path,
        tokenizer=tokenizer,
        template=_template(path, settings.template),
        special_tokens=special_tokens,
        stop_tokens=tuple(settings.stop_tokens) or _stop_tokens(path, tokenizer, special_tokens),
        model_type=str(_read_json(path / "config.json").get("model_type", "")),
        settings=settings,
    )


def _settings(path: Path) -> RendererSettings:
    try:
        return msgspec.json.decode(path.read_bytes(), type=RendererSettings) if path.is_file() else RendererSettings()
    except (OSError, RecursionError, msgspec.DecodeError) as error:
        known = ", ".join(RendererSettings.__struct_fields__)
        raise ConfigError(f"{path}: {error}; its keys are {known}") from error


def _special_tokens(path: Path) -> dict[str, str]:
    """Name to token. `tokenizer_config.json` wins over the older `special_tokens_map.json`."""
    named = {**_read_json(path / "special_tokens_map.json"), **_read_json(path / "tokenizer_config.json")}
    found = {name: named.get(name) for name in _SPECIAL_TOKENS}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _stop_tokens(path: Path, tokenizer: Tokenizer, special_tokens: Mapping[str, str]) -> tuple[str, ...]:
    """The end-of-sequence token, and those that the model was tuned to end with, without repeats."""
    file = path / "generation_config.json"
    ids = _read_json(file).get("eos_token_id")
    ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if wrong := [each for each in ids if type(each) is not int or not 0 <= each < _MOST_IDS]:
        raise ConfigError(f"{file}: eos_token_id must be a token's id or a list of ids, not {wrong[0]!r}")
    tokens = [special_tokens.get("eos_token"), *map(tokenizer.id_to_token, ids)]
    return tuple(dict.fromkeys(token for token in tokens if token is not None))


def _template(path: Path, name: str) -> str:
    """The chat template's text: a file of its own, or a string, or one of several with names."""
    if (path / "chat_template.jinja").is_file():
        return _read_text(path / "chat_template.jinja")
    for file in ("chat_template.json", "tokenizer_config.json"):
        template = _read_json(path / file).get("chat_template")
        if isinstance(template, list):
            template = _named_template(path / file, template, name)
        if isinstance(template, str):
            return template
        if template is not None:
            raise ConfigError(f"{path / file}: chat_template must be text or a list, not {type(template).__name__}")
    return ""


def _named_template(file: Path, templates: list[Any], name: str) -> str:
    named: dict[str, str] = {
        each["name"]: each["template"]
        for each in templates
        if isinstance(each, dict) and isinstance(each.get("name"), str) and isinstance(each.get("template"), str)
    }
    if len(named) < len(templates):
        raise ConfigError(f'{file}: chat_template must be a list of {{"name": …, "template": …}}, each name once')
    chosen = name or next((each for each in _TEMPLATE_NAMES if each in named), "")
    if chosen not in named:
        raise ConfigError(
            f'{file} has no chat template {chosen!r}; name one of {", ".join(named)} as "template" in renderer.json'
        )
    return named[chosen]


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_read_text(path)) if path.is_file() else {}
    except (RecursionError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} is not a JSON object: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object but a {type(value).__name__}")
    return value
