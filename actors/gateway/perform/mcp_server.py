"""One process of an MCP server, spoken to over its standard input and output.

Owned by one task, as the SDK's connection has to be left where it was entered. The process gets the environment that
it is given and little else, and has a session of its own; `stop` closes its input, and kills it with all that it
started where it does not end by that. What it writes to its standard error is kept for messages, the last of it.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mcp import Client, StdioServerParameters, stdio_client
from mcp.shared.exceptions import MCPError
from mcp_types import CONNECTION_CLOSED, CallToolResult, Implementation, Tool, ToolListChangedNotification
from pydantic import ValidationError

from headrace import __version__
from headrace.actors.gateway.perform.performer import ToolFailed
from headrace.platform.errors import InfrastructureFault

_MOST_TOOLS = 1000
_STDERR_BYTES = 2048


@dataclass(frozen=True, slots=True)
class Launch:
    """How a server is started; `env` is resolved already."""

    command: str
    args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None


class McpServer:
    """A server. One `start`, then calls, which may overlap, then `stop`.

    `list_changed` says that it has told of other tools than it had, `is_dead` that it is gone.

    Args:
        launch: how it is started.
        redact: takes secrets out of messages.
    """

    def __init__(self, launch: Launch, redact: Callable[[str], str] = str) -> None:
        self._launch, self._redact = launch, redact
        self._owner: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Client] | None = None
        self._stop = asyncio.Event()
        self._stderr = _Tail()
        self.list_changed = False
        self.is_dead = False

    async def start(self) -> None:
        """Start the process and greet it.

        Raises:
            FileNotFoundError, PermissionError: there is no such program.
            InfrastructureFault: it did not come up; the message has the last of what it wrote.
        """
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        self._owner = loop.create_task(self._own(self._ready))
        try:
            await asyncio.shield(self._ready)
        except (FileNotFoundError, PermissionError):
            raise
        except Exception as error:
            raise self._gone(error, "did not come up") from None

    def another(self) -> "McpServer":
        """One that is started in the same way, and is not yet."""
        return McpServer(self._launch, self._redact)

    async def tools(self) -> list[Tool]:
        """What it offers now.

        Raises:
            InfrastructureFault: it is gone, or offers no end of tools.
        """
        found: list[Tool] = []
        cursor: str | None = None
        while True:
            try:
                page = await self._client.list_tools(cursor=cursor)
            except Exception as error:
                raise self._gone(error) from None
            found += page.tools
            cursor = page.next_cursor
            if not cursor:
                return found
            if len(found) > _MOST_TOOLS or not page.tools:
                raise InfrastructureFault(f"{self._launch.command} has more than {_MOST_TOOLS} tools")

    async def call(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        """Call a tool.

        Raises:
            ToolFailed: it says that it cannot, or its answer is none.
            InfrastructureFault: it is gone.
        """
        try:
            return await self._client.call_tool(name, arguments)
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                raise self._gone(error) from None
            raise ToolFailed(str(error)) from None
        except (ValidationError, RuntimeError) as error:  # it answered, though not as it declares to
            raise ToolFailed(f"the server's answer cannot be read: {type(error).__name__}") from None
        except Exception as error:
            raise self._gone(error) from None

    async def stop(self) -> None:
        """End the process, and all that it started. Safe to call twice."""
        self._stop.set()
        if self._owner is not None:
            if self._ready is not None and not self._ready.done():  # it was never greeted
                self._owner.cancel()
            await asyncio.gather(self._owner, return_exceptions=True)

    @property
    def _client(self) -> Client:
        if self.is_dead or self._ready is None or not self._ready.done():
            raise InfrastructureFault(f"{self._launch.command} is gone")
        return self._ready.result()

    async def _own(self, ready: "asyncio.Future[Client]") -> None:
        launch = self._launch
        parameters = StdioServerParameters(
            command=launch.command, args=list(launch.args), env=dict(launch.env), cwd=launch.cwd
        )
        try:
            async with contextlib.AsyncExitStack() as stack:
                errlog = await self._stderr.open()
                stack.callback(self._stderr.close)
                transport = stdio_client(parameters, errlog=errlog)
                info = Implementation(name="headrace", version=__version__)
                client = Client(transport, message_handler=self._heard, client_info=info, cache=None)
                await stack.enter_async_context(client)
                ready.set_result(client)
                await self._stop.wait()
        except Exception as error:
            if not ready.done():
                ready.set_exception(error)
        finally:
            self.is_dead = True
            if not ready.done():
                ready.cancel()

    async def _heard(self, message: object) -> None:
        if isinstance(message, ToolListChangedNotification):
            self.list_changed = True

    def _gone(self, error: Exception, what: str = "is gone") -> InfrastructureFault:
        self.is_dead = True
        told = f"{self._launch.command} {what}: {type(error).__name__}: {error}\n{self._stderr.text}"
        return InfrastructureFault(self._redact(told.strip()))


class _Tail(asyncio.Protocol):
    """The last of what a process writes."""

    def __init__(self) -> None:
        self._data = b""
        self._transport: asyncio.BaseTransport | None = None
        self._writes: Any = None

    @property
    def text(self) -> str:
        return self._data.decode(errors="replace").strip()

    async def open(self) -> Any:
        """The file to write to."""
        reads, writes = os.pipe()
        loop = asyncio.get_running_loop()
        self._writes = os.fdopen(writes, "w")
        self._transport, _ = await loop.connect_read_pipe(lambda: self, os.fdopen(reads, "rb", 0))
        return self._writes

    def data_received(self, data: bytes) -> None:
        self._data = (self._data + data)[-_STDERR_BYTES:]

    def close(self) -> None:
        self._writes.close()
        if self._transport is not None:
            self._transport.close()
