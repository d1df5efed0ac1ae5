"""`mcp`: the tools of an MCP server that a recipe starts, behind the same decisions as any other.

A server is not believed. Its tools are listed when it is mounted, and pinned by digest: a process that offers anything
else, now or later, is asked for nothing. Its hints on side effects are passed over: a call counts as a write unless the
recipe says otherwise. Names, descriptions and schemas are text of a stranger: bounded, and without what is not seen.
Each episode has a process of its own, unless the recipe says that they share one (`shared`), for servers without state.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from mcp_types import CallToolResult, TextContent, Tool

from headrace.actors.gateway.boxed import mounted_spec
from headrace.actors.gateway.decisions.asked import Asked, Denial, EpisodeState
from headrace.actors.gateway.decisions.output import bounded, neutralised
from headrace.actors.gateway.decisions.schema import validator_of
from headrace.actors.gateway.perform.mcp_server import Launch, McpServer
from headrace.actors.gateway.perform.performer import Refused, read_args
from headrace.actors.gateway.policy import Mount
from headrace.platform.config.secret_references import SecretValues, resolve
from headrace.platform.contracts import ToolOutput
from headrace.platform.errors import ConfigError, GatewayAway, InfrastructureFault
from headrace.platform.hashing import digest_value
from headrace.platform.records.message import ToolSpec
from headrace.platform.records.status import Capability, SideEffectTier

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MOST_DESCRIPTION = 4096
_MOST_SCHEMA = 64 * 1024
_MOST_RESULT = 1024 * 1024
_START_S = 30.0


class ToolArgs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a recipe says of one tool. `capability` is `read` for a tier of `read`, else `write`, where it is not given;
    `reads` tells what arguments mean, as `ToolSpec.reads`."""

    tier: SideEffectTier = SideEffectTier.WRITE
    capability: Capability | None = None
    reads: dict[str, str] = {}
    trusted: bool | None = None
    price: float = 0.0


class McpArgs(msgspec.Struct, frozen=True, kw_only=True):
    """The `args` of a mount: how the server is started, which of its tools there are, and what they do."""

    command: str
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    cwd: str | None = None
    shared: bool = False
    only: tuple[str, ...] = ()
    tools: dict[str, ToolArgs] = {}
    trusted: bool = False


class McpTool:
    """See the module. Made by `make`."""

    def __init__(
        self, args: McpArgs, first: McpServer, names: dict[str, str], specs: dict[str, ToolSpec], pin: str
    ) -> None:
        self.specs = specs
        self._args, self._names, self._pin = args, names, pin
        self._first: McpServer | None = first
        """The process whose tools were listed: nobody has called it yet, so that it is the first episode's."""
        self._template = first
        self._servers: dict[str, asyncio.Task[McpServer]] = {}

    @classmethod
    async def make(cls, mount: Mount, secrets: SecretValues, env: Mapping[str, str]) -> "McpTool":
        """The tools of a mount, as its server lists them now.

        Raises:
            ConfigError: its args are none, there is no such program, or its tools cannot be used.
            GatewayAway: the server did not come up.
        """
        args = read_args(mount, McpArgs)
        given = {name: resolve(value, secrets, env) for name, value in args.env.items()}
        launch = Launch(args.command, [resolve(each, secrets, env) for each in args.args], given, args.cwd)
        server = McpServer(launch, secrets.redact)
        try:
            async with asyncio.timeout(_START_S):
                await server.start()
                listed = await server.tools()
            names, specs = _specs(mount, args, listed)
        except BaseException as error:
            await server.stop()
            if isinstance(error, FileNotFoundError | PermissionError):
                raise ConfigError(f"tools: mcp: args.command: {error}") from None
            if isinstance(error, TimeoutError | InfrastructureFault):
                told = str(error) or f"{args.command} did not answer within {_START_S:g} s"
                raise GatewayAway(f"tools: mcp: {told}") from None
            raise
        return cls(args, server, names, specs, _digest(listed))

    async def perform(self, asked: Asked, state: EpisodeState) -> ToolOutput:
        """See `Performer`."""
        server = await self._server("" if self._args.shared else state.scope)
        if server.list_changed or _digest(await server.tools()) != self._pin:
            raise Refused(Denial("gateway:definition_changed", "the tool is not any more what it was declared to be"))
        return _output(await server.call(self._names[asked.call.name], asked.call.arguments))

    async def end(self, scope: str) -> None:
        """See `Performer`: the process of the episode ends."""
        if scope and (starting := self._servers.pop(scope, None)) is not None:
            await _stopped(starting)

    async def close(self) -> None:
        """See `Performer`: all processes end."""
        servers, self._servers = list(self._servers.values()), {}
        first, self._first = self._first, None
        await asyncio.gather(*[_stopped(starting) for starting in servers], *([first.stop()] if first else []))

    async def _server(self, owner: str) -> McpServer:
        """The server of an episode, or of all; begun with the first call. One that is gone has taken an episode's state
        with it; a shared one is begun again.

        Raises:
            InfrastructureFault: it is gone, or did not come up.
        """
        starting = self._servers.get(owner)
        if starting is not None and not owner and starting.done() and _is_gone(starting):
            await _stopped(self._servers.pop(owner))
            starting = None
        if starting is None:
            starting = self._servers[owner] = asyncio.get_running_loop().create_task(self._start())
        return await asyncio.shield(starting)

    async def _start(self) -> McpServer:
        first, self._first = self._first, None
        if first is not None and not first.is_dead:
            return first
        server = self._template.another()
        try:
            async with asyncio.timeout(_START_S):
                await server.start()
        except BaseException as error:
            await server.stop()
            if isinstance(error, TimeoutError | OSError):
                raise InfrastructureFault(f"{self._args.command} did not come up") from error
            raise
        return server


def _is_gone(starting: "asyncio.Task[McpServer]") -> bool:
    return starting.cancelled() or starting.exception() is not None or starting.result().is_dead


async def _stopped(starting: "asyncio.Task[McpServer]") -> None:
    starting.cancel()
    for server in await asyncio.gather(starting, return_exceptions=True):
        if isinstance(server, McpServer):
            await server.stop()


def _digest(tools: Sequence[Tool]) -> str:
    """Of all that a model could be told of a server's tools."""
    return digest_value([tool.model_dump(mode="json", by_alias=True) for tool in sorted(tools, key=lambda t: t.name)])


def _specs(mount: Mount, args: McpArgs, listed: Sequence[Tool]) -> tuple[dict[str, str], dict[str, ToolSpec]]:
    """The server's names by those that the model uses, and what is declared to the model. Raises ConfigError."""
    known = {tool.name: tool for tool in listed}
    if missing := [name for name in (*args.only, *args.tools) if name not in known]:
        raise ConfigError(f"tools: mcp: {args.command} has no tool {missing[0]!r}; it has {', '.join(sorted(known))}")
    names: dict[str, str] = {}
    specs: dict[str, ToolSpec] = {}
    for name in args.only or sorted(known):
        spec = mounted_spec(_spec(known[name], args), mount, alone=False)
        if (said := args.tools.get(name)) is not None and said.capability is not None:
            spec = msgspec.structs.replace(spec, capability=said.capability)
        validator_of(spec)
        names[spec.name], specs[spec.name] = name, spec
    if not specs:
        raise ConfigError(f"tools: mcp: {args.command} has no tools")
    return names, specs


def _spec(tool: Tool, args: McpArgs) -> ToolSpec:
    said = args.tools.get(tool.name, ToolArgs())
    if not _NAME.fullmatch(tool.name):
        raise ConfigError(f"tools: mcp: {tool.name[:80]!r} is no name that a model can use; list others in args.only")
    if len(msgspec.json.encode(tool.input_schema)) > _MOST_SCHEMA:
        raise ConfigError(f"tools: mcp: the schema of {tool.name} has more than {_MOST_SCHEMA} bytes")
    return ToolSpec(
        tool.name,
        _plain(tool.description or ""),
        _plain_schema(tool.input_schema),
        Capability.READ if said.tier is SideEffectTier.READ else Capability.WRITE,
        said.tier,
        said.reads,
        args.trusted if said.trusted is None else said.trusted,
        said.price,
    )


def _plain(text: str) -> str:
    return bounded(neutralised(text), _MOST_DESCRIPTION)[0]


def _plain_schema(value: Any) -> Any:
    if isinstance(value, dict):
        return {_plain(str(name)): _plain_schema(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain_schema(each) for each in value]
    return _plain(value) if isinstance(value, str) else value


def _output(result: CallToolResult) -> ToolOutput:
    """The parts of an answer as text; what is none is named. What is only structured is shown as JSON."""
    parts = [part.text if isinstance(part, TextContent) else f"[{part.type}, not shown]" for part in result.content]
    if not parts and result.structured_content is not None:
        parts = [msgspec.json.encode(result.structured_content).decode()]
    return ToolOutput(bounded("\n".join(parts), _MOST_RESULT)[0], not result.is_error)
