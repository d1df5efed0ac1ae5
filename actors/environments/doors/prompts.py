"""The opening of an episode out of a row: a system prompt and the row's question, or its own messages."""

from collections.abc import Mapping
from typing import Any

from headrace.platform.records.message import Message
from headrace.platform.records.status import Role


def opening_messages(row: Mapping[str, Any], column: str, system: str) -> tuple[Message, ...]:
    """What the model is told first.

    Args:
        row: `row[column]` is the user's message as text, or a list of messages with `role` and `content`.
        column: the column that holds it.
        system: a system message before it; none where it is empty.

    Raises:
        ValueError: says what is wrong with the row.
    """
    if column not in row:
        raise ValueError(f"there is no column {column!r} for the prompt, only {', '.join(row) or 'none'}; set prompt=")
    before = (Message(Role.SYSTEM, system),) if system else ()
    prompt = row[column]
    if isinstance(prompt, str):
        return (*before, Message(Role.USER, prompt))
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"the column {column!r} holds {prompt!r:.80}; it must be text or a list of messages")
    return (*before, *(_message(each, column, number) for number, each in enumerate(prompt, 1)))


def _message(data: Any, column: str, number: int) -> Message:
    if not isinstance(data, dict) or set(data) != {"role", "content"} or not isinstance(data["content"], str):
        raise ValueError(f"message {number} of {column!r} must be {{'role': …, 'content': TEXT}}, not {data!r:.80}")
    if data["role"] not in list(Role):
        raise ValueError(f"message {number} of {column!r} has the role {data['role']!r}; known: {', '.join(Role)}")
    return Message(Role(data["role"]), data["content"])
