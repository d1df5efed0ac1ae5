"""A gateway in this process: deny by default, each key once."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from headrace.platform.contracts import ToolResult
from headrace.platform.records.message import ToolCall

Handler: TypeAlias = Callable[[dict[str, Any]], Awaitable[str]]


class MemoryGateway:
    """Runs the tools that it was given and denies every other.

    A handler that raises gives a result that is not `ok`; the call has happened and its key is spent.

    Args:
        handlers: async functions from arguments to text, by tool name.
    """

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self._handlers = dict(handlers)
        self._calls: dict[str, tuple[ToolCall, asyncio.Future[ToolResult]]] = {}

    async def call(self, tool_call: ToolCall, key: str) -> ToolResult:
        """See `ToolGateway.call`.

        Raises:
            ValueError: for a key that belongs to another call (P25).
        """
        if key in self._calls:
            known, result = self._calls[key]
            if known != tool_call:
                raise ValueError(f"key {key!r} belongs to another call")
        else:
            # A task of its own, because a caller that goes away does not undo an effect that has begun.
            result = asyncio.ensure_future(self._run(tool_call))
            self._calls[key] = (tool_call, result)
        return await asyncio.shield(result)

    async def _run(self, tool_call: ToolCall) -> ToolResult:
        handler = self._handlers.get(tool_call.name)
        if handler is None:
            return ToolResult(f"the tool {tool_call.name!r} is not allowed", "deny", ok=False)
        try:
            content = await handler(tool_call.arguments)
        except Exception as error:  # the tool's boundary: what it raises is an answer to the model
            return ToolResult(f"{tool_call.name} failed: {error}", "allow", ok=False, source=tool_call.name)
        return ToolResult(content, "allow", source=tool_call.name)
