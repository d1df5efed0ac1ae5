"""Chats as people store them, read into messages.

Owns the form of a row: `messages` as OpenAI's API writes them (role, content, tool_calls, reasoning_content,
tool_call_id), `tools` where there are any, and which messages are imitated. A row that does not have this form is
refused by file and row, never repaired. How messages become tokens belongs to `traces.py`.
"""

import codecs
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec

from headrace.platform.errors import ConfigError
from headrace.platform.records.message import Message, ToolCall, ToolSpec
from headrace.platform.records.status import Role

_ROLES = {"system": Role.SYSTEM, "developer": Role.SYSTEM, **{role.value: role for role in Role}}
_REASONING = ("reasoning_content", "reasoning")
_KEYS = ("role", "content", "tool_calls", "tool_call_id", "train", "weight", *_REASONING)
# What logs of OpenAI's API carry besides, and no template shows.
_IGNORED = ("name", "id", "refusal", "annotations", "audio")
_MOST_PROBLEMS = 5
_LINES, _TABLE = ".jsonl", ".parquet"


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat:
    """One row. `trained` has one entry a message: whether it is imitated. `where` is the file's name and the row."""

    where: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    trained: tuple[bool, ...]


def read_chats(file: str | Path) -> list[Chat]:
    """The rows of a `.jsonl` or `.parquet` file, in order; empty lines are passed over.

    A message of the assistant is imitated unless it says `"train": false` or `"weight": 0`. `arguments` of a tool call
    may be an object or a string that holds one, `tools` a list or a string that holds one. Parquet fills absent keys
    of structs with nulls, so nulls are taken for absent there.

    Raises:
        ConfigError: the file does not exist, holds no row, or rows that cannot be read: it names the first of them.
    """
    path = Path(file)
    check_chat_file(path)
    chats: list[Chat] = []
    problems: list[str] = []
    for number, row in _lines(path) if path.suffix.lower() == _LINES else _table_rows(path):
        where = f"{path.name}:{number}"
        try:
            chats.append(_chat(where, msgspec.json.decode(row) if isinstance(row, bytes) else row))
        except ValueError as error:  # ConfigError and what msgspec raises are ValueErrors
            problems.append(f"{where}: {error}")
    refuse(problems, f"{path}: rows that cannot be read")
    if not chats:
        raise ConfigError(f"{path} holds no row")
    return chats


def check_chat_file(path: Path) -> None:
    """Refuse what is no `.jsonl` or `.parquet` file by its name, in capitals or not. Raises ConfigError."""
    if path.suffix.lower() not in (_LINES, _TABLE):
        hint = "; write one row a line: jq -c '.[]' FILE.json > FILE.jsonl" if path.suffix.lower() == ".json" else ""
        raise ConfigError(f"{path}: chats are read from .jsonl and .parquet files{hint}")
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")


def refuse(problems: list[str], what: str) -> None:
    """Raise ConfigError with the first of `problems`, if there are any."""
    if problems:
        more = len(problems) - _MOST_PROBLEMS
        lines = [*problems[:_MOST_PROBLEMS], *([f"and {more} more"] if more > 0 else [])]
        raise ConfigError(f"{what}\n" + "\n".join(f"  - {line}" for line in lines))


def chat_texts(chats: Iterable[Chat]) -> Iterator[str]:
    """Everything that is said in `chats`, as plain text: what a vocabulary can be learned from."""
    for chat in chats:
        for tool in chat.tools:
            yield from (tool.name, tool.description, msgspec.json.encode(tool.parameters).decode())
        for message in chat.messages:
            yield from (message.reasoning, message.content)
            for call in message.tool_calls:
                yield msgspec.json.encode({"name": call.name, "arguments": call.arguments}).decode()


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            # Editors on Windows write a mark before the first row.
            row = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if row.strip():
                yield number, row


def _table_rows(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        batches = pq.ParquetFile(path).iter_batches(batch_size=1024)
        rows = (row for batch in batches for row in batch.to_pylist())
        yield from ((number, _without_nulls(row)) for number, row in enumerate(rows, start=1))
    except pa.ArrowException as error:
        raise ConfigError(f"{path} is no readable Parquet file: {error}") from None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _chat(where: str, row: Any) -> Chat:
    if not isinstance(row, dict) or not isinstance(row.get("messages"), list):
        raise ConfigError("a row is an object with a list `messages`")
    rows = row["messages"]
    read = [_at(f"message {position}", _message, each) for position, each in enumerate(rows)]
    messages = _with_call_ids([message for message, _ in read])
    if not messages or messages[0].role not in (Role.SYSTEM, Role.USER):
        raise ConfigError("the first message must be the system's or the user's")
    if all(message.role is not Role.ASSISTANT for message in messages):
        raise ConfigError("no message is the assistant's, so there is nothing to imitate")
    tools = _json_list(row.get("tools") or [], "tools")
    return Chat(
        where=where,
        messages=messages,
        tools=tuple(_at(f"tool {position}", _tool, each) for position, each in enumerate(tools)),
        trained=tuple(trained for _, trained in read),
    )


def _at(place: str, read: Any, value: Any) -> Any:
    try:
        if not isinstance(value, dict):
            raise ConfigError(f"must be an object, not {type(value).__name__}")
        return read(value)
    except ValueError as error:
        raise ConfigError(f"{place}: {error}") from None


def _message(row: dict[str, Any]) -> tuple[Message, bool]:
    for key, value in row.items():
        if key not in (*_KEYS, *_IGNORED) and value not in (None, "", [], {}):
            near = get_close_matches(key, _KEYS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(_KEYS)}"
            raise ConfigError(f"unknown key {key!r}; {hint}")
    name = row.get("role")
    if not isinstance(name, str) or name not in _ROLES:
        raise ConfigError(f"role {name!r} is none of {', '.join(_ROLES)}")
    role = _ROLES[name]
    calls = row.get("tool_calls") or []
    reasoning = next((text for key in _REASONING if (text := row.get(key))), "")
    if role is not Role.ASSISTANT and (calls or reasoning or row.get("train") or row.get("weight")):
        raise ConfigError(f"tool_calls, reasoning_content, train and weight are the assistant's, not of role {role}")
    message = Message(
        role,
        _content(row.get("content")),
        _string(reasoning, "reasoning_content"),
        tuple(_call(call, index) for index, call in enumerate(_json_list(calls, "tool_calls"))),
        _string(row.get("tool_call_id") or "", "tool_call_id"),
    )
    return message, role is Role.ASSISTANT and _is_trained(row)


def _with_call_ids(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Results that do not say which call they answer answer the calls before them in order, as an episode's do."""
    named: list[Message] = []
    open_calls: list[str] = []
    for message in messages:
        if message.role is Role.ASSISTANT:
            open_calls = [call.call_id for call in message.tool_calls]
        elif message.role is Role.TOOL and open_calls:
            call_id = open_calls.pop(0)
            if not message.tool_call_id:
                message = msgspec.structs.replace(message, tool_call_id=call_id)
        named.append(message)
    return tuple(named)


def _is_trained(row: dict[str, Any]) -> bool:
    train, weight = row.get("train"), row.get("weight")
    if not (train is None or isinstance(train, bool)):
        raise ConfigError(f"train must be true or false, not {train!r}")
    if weight not in (None, 0, 1):
        raise ConfigError(f"weight must be 0 or 1, not {weight!r}")
    return train is not False and weight != 0


def _content(value: Any) -> str:
    """Text, or a list of text parts."""
    if isinstance(value, list):
        for part in value:
            if not isinstance(part, dict) or part.get("type", "text") != "text":
                raise ConfigError("content has a part that is no text; only text can be imitated")
        return "".join(_string(part.get("text"), "text") for part in value)
    return _string("" if value is None else value, "content")


def _call(row: Any, index: int) -> ToolCall:
    function = row.get("function", row) if isinstance(row, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ConfigError('a tool call is {"function": {"name": …, "arguments": {…}}}')
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = _json(arguments, f"arguments of {function['name']}")
    if not isinstance(arguments, dict):
        raise ConfigError(f"arguments of {function['name']} must be an object, not {type(arguments).__name__}")
    return ToolCall(function["name"], arguments, _string(row.get("id") or f"call_{index}", "id"))


def _tool(row: dict[str, Any]) -> ToolSpec:
    function = row.get("function", row)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ConfigError('a tool is {"name": …, "description": …, "parameters": {…}}, or that as its `function`')
    parameters = function.get("parameters") or {}
    if isinstance(parameters, str):
        parameters = _json(parameters, f"parameters of {function['name']}")
    if not isinstance(parameters, dict):
        raise ConfigError(f"parameters of {function['name']} must be a JSON Schema, not {type(parameters).__name__}")
    return ToolSpec(function["name"], _string(function.get("description") or "", "description"), parameters)


def _json_list(value: Any, what: str) -> list[Any]:
    value = _json(value, what) if isinstance(value, str) else value
    if not isinstance(value, list):
        raise ConfigError(f"{what} must be a list, not {type(value).__name__}")
    return value


def _json(text: str, what: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except ValueError as error:
        raise ConfigError(f"{what} is a string that holds no JSON: {error}") from None


def _string(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{what} must be text, not {type(value).__name__}")
    return value
