"""Messages and tools in the form that chat templates and the library of renderers take."""

from collections.abc import Callable, Sequence
from typing import Any

from headrace.platform.records.message import Message, ToolSpec

Change = Callable[[str], str]


def chat_message(message: Message, content: str, cut: Change) -> dict[str, Any]:
    """A message with `content` for its text and every other text of it changed by `cut`."""
    form: dict[str, Any] = {"role": str(message.role), "content": content}
    if message.tool_calls:
        form["tool_calls"] = [
            {
                "id": cut(call.call_id),
                "type": "function",
                "function": {"name": cut(call.name), "arguments": each_text(call.arguments, cut)},
            }
            for call in message.tool_calls
        ]
    if message.reasoning:
        form["reasoning_content"] = form["thinking"] = cut(message.reasoning)
    if message.tool_call_id:
        form["tool_call_id"] = cut(message.tool_call_id)
    return form


def chat_tools(tools: Sequence[ToolSpec], cut: Change) -> list[dict[str, Any]]:
    """Tools with every text of their schemas changed by `cut`."""
    return [
        {
            "type": "function",
            "function": {
                "name": cut(tool.name),
                "description": cut(tool.description),
                "parameters": each_text(tool.parameters, cut),
            },
        }
        for tool in tools
    ]


def each_text(value: Any, change: Change) -> Any:
    """A JSON value with every string in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): each_text(each, change) for key, each in value.items()}
    return [each_text(each, change) for each in value] if isinstance(value, list | tuple) else value
