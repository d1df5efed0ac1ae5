"""What a model would not learn of a chat: what its template or its tokenizer loses, found before anything is trained.

A turn of the assistant must read back as it was meant, or the row is refused. Of all other messages it is counted what
the template leaves out: the model is trained without having seen it.
"""

import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from headrace.platform.contracts import ParsedMessage, Renderer
from headrace.platform.errors import ConfigError
from headrace.platform.records.message import Message, ToolCall, ToolSpec
from headrace.platform.records.status import Role

# A character that no vocabulary has: one that knows it knows all, byte by byte.
_NOBODY_KNOWS = "\U000f1234"
_MOST_TEXT = 60


# --- turns of the assistant -------------------------------------------------------------------------------------------


def what_is_lost(message: Message, read: ParsedMessage) -> str:
    """What the policy's side would not read back out of the tokens of a turn, or nothing.

    Space around a text is of no account, nor is what a tokenizer normalises (NFKC), nor that a format without types
    writes a number as text.
    """
    if read.error:
        return f"what the template writes cannot be read back: {read.error}"
    if [call.name for call in message.tool_calls] != [call.name for call in read.tool_calls]:
        return "its tool calls do not read back out of what the model's template writes"
    for meant, got in zip(message.tool_calls, read.tool_calls, strict=True):
        if lost := _lost_arguments(meant, got):
            return lost
    if message.reasoning.strip() and not read.reasoning.strip():
        return "the model's template leaves its reasoning_content out; use another template, or drop it from the data"
    if message.content.strip() and not read.content.strip():
        return "the model's template leaves its content out"
    for what, text, got_text in (
        ("reasoning_content", message.reasoning, read.reasoning),
        ("content", message.content, read.content),
    ):
        if not _alike(text.strip(), got_text.strip()):
            return (
                f"its {what} {_around(text.strip(), got_text.strip())} reads back as"
                f" {_around(got_text.strip(), text.strip())}: the model's template or tokenizer has no place for it"
            )
    return ""


def _lost_arguments(meant: ToolCall, got: ToolCall) -> str:
    for key in sorted(meant.arguments.keys() | got.arguments.keys()):
        if key not in got.arguments:
            return f"the argument {key!r} of {meant.name} is lost in what the model's template writes"
        if key not in meant.arguments:
            return f"{meant.name} reads back with an argument {key!r} that it was not given"
        if not _same_value(meant.arguments[key], got.arguments[key]):
            wanted, found = _json(meant.arguments[key]), _json(got.arguments[key])
            return (
                f"the argument {key!r} of {meant.name}, {_around(wanted, found)}, reads back as"
                f" {_around(found, wanted)}"
            )
    return ""


def _same_value(meant: Any, got: Any) -> bool:
    if isinstance(meant, bool | int | float) and isinstance(got, str):
        return got in (str(meant), _json(meant))
    return _alike(_json(meant), _json(got))


def _json(value: Any) -> str:
    return msgspec.json.encode(value, order="deterministic").decode()


def _alike(text: str, other: str) -> bool:
    return text == other or unicodedata.normalize("NFKC", text) == unicodedata.normalize("NFKC", other)


def _around(text: str, other: str) -> str:
    """The part of `text` where it begins to differ from `other`, quoted."""
    at = next((index for index, pair in enumerate(zip(text, other, strict=False)) if pair[0] != pair[1]), len(other))
    start = max(0, min(at, len(text)) - _MOST_TEXT // 2)
    part = text[start : start + _MOST_TEXT]
    return repr(f"{'…' if start else ''}{part}{'…' if start + _MOST_TEXT < len(text) else ''}")


# --- what the model sees ----------------------------------------------------------------------------------------------


def left_out(renderer: Renderer, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[str]:
    """The roles of messages that the template does not show, and "tools" where it does not show those; each once.

    A message is not shown where nothing changes without its content. Messages before a bridge that the template does
    not allow are not looked at.
    """
    first = next((index for index, each in enumerate(messages) if each.role is Role.ASSISTANT), len(messages))
    opening = messages[:first]
    found = _without(opening, lambda shown: renderer.render(shown, tools))
    if tools and _ids(lambda: renderer.render(opening, ())) == renderer.render(opening, tools):
        found.append("tools")
    answers: list[Message] = []
    for message in messages[first:]:
        if message.role is not Role.ASSISTANT:
            answers.append(message)
            continue
        found += _without(answers, lambda shown: renderer.bridge(shown, True)) if answers else []
        answers = []
    return list(dict.fromkeys(found))


def _without(messages: Sequence[Message], show: Callable[[Sequence[Message]], list[int] | None]) -> list[str]:
    """The roles of those of `messages` without whose content `show` gives the same."""
    whole = _ids(lambda: show(messages))
    if whole is None:
        return []
    found: list[str] = []
    for index, message in enumerate(messages):
        bare = [*messages[:index], msgspec.structs.replace(message, content=""), *messages[index + 1 :]]
        if message.content.strip() and _ids(lambda bare=bare: show(bare)) == whole:  # type: ignore[misc]
            found.append(str(message.role))
    return found


def _ids(show: Callable[[], list[int] | None]) -> list[int] | None:
    """None also where the template refuses: it looks at what it is given then."""
    try:
        return show()
    except ConfigError:
        return None


def unknown_token(folder: Path) -> int | None:
    """The token that stands for all text that the vocabulary of a model folder lacks; None where it lacks nothing.

    Raises:
        ConfigError: the folder has no tokenizer that can be read.
    """
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        model = msgspec.json.decode((folder / "tokenizer.json").read_bytes())["model"]
    except Exception as error:  # the library has no type of its own for it
        raise ConfigError(f"{folder / 'tokenizer.json'} cannot be read: {error}") from error
    token_id = model.get("unk_id")
    if token_id is None and model.get("unk_token"):
        token_id = tokenizer.token_to_id(model["unk_token"])
    return token_id if token_id in tokenizer.encode(_NOBODY_KNOWS, add_special_tokens=False).ids else None
