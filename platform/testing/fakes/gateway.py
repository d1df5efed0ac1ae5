"""Gateways in this process: deny by default, each key once."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

from headrace.platform.contracts import Audited, CallVerdict, ToolOutput, ToolResult
from headrace.platform.errors import GatewayAway, SafetyBlock
from headrace.platform.records.message import ToolCall, ToolSpec
from headrace.platform.records.permissions import Grant, Safety

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


class MemorySession:
    """A `ToolSession` that allows the tools that it was given, but for those that are denied by a rule.

    `decided`, `settled` and `replayed` are what it was asked or told, in order. While `away` is set, every call of it
    raises GatewayAway.

    Args:
        tools: those that the caller performs.
        handlers: those that it performs itself, by name.
        denied: rules by the names of the tools that they deny.
        blocks: a denied call ends the episode.
    """

    def __init__(
        self,
        tools: Sequence[ToolSpec] = (),
        handlers: Mapping[str, Handler] = {},
        denied: Mapping[str, str] = {},
        *,
        blocks: bool = False,
    ) -> None:
        self._tools, self._handlers, self._denied = {tool.name: tool for tool in tools}, dict(handlers), dict(denied)
        self._blocks = blocks
        self._turns: dict[str, tuple[tuple[ToolCall, ...], list[CallVerdict]]] = {}
        self._blocked: dict[str, int] = {}
        self._calls = 0
        self._audited: Audited | None = None
        self.away = False
        self.decided: list[tuple[str, tuple[ToolCall, ...]]] = []
        self.settled: list[tuple[str, tuple[ToolOutput, ...]]] = []
        self.replayed: list[tuple[ToolCall, ...]] = []

    async def decide(self, calls: Sequence[ToolCall], key: str) -> Sequence[CallVerdict]:
        """See `ToolSession.decide`."""
        self._answer()
        if key in self._turns:
            known, verdicts = self._turns[key]
            if known != tuple(calls):
                raise ValueError(f"key {key!r} belongs to other calls")
            return verdicts
        if self._audited is not None:
            raise SafetyBlock("its session is over")
        self.decided.append((key, tuple(calls)))
        self._calls += len(calls)
        verdicts = [await self._verdict(call) for call in calls]
        self._turns[key] = tuple(calls), verdicts
        if self._blocks and self._blocked:
            raise SafetyBlock(", ".join(self._blocked))
        return verdicts

    def recorded(self, calls: Sequence[ToolCall]) -> None:
        """See `ToolSession.recorded`."""
        self.replayed.append(tuple(calls))

    async def settle(self, outputs: Sequence[ToolOutput], key: str) -> Sequence[ToolResult]:
        """See `ToolSession.settle`. Outputs come back as they are."""
        self._answer()
        self.settled.append((key, tuple(outputs)))
        calls, verdicts = self._turns.get(key, ((), []))
        owed = [call.name for call, verdict in zip(calls, verdicts, strict=True) if verdict.result is None]
        names = owed if len(owed) == len(outputs) else ["unknown"] * len(outputs)
        return [
            ToolResult(each.content, "allow", each.ok, f"tool:{name}")
            for name, each in zip(names, outputs, strict=True)
        ]

    async def close(self) -> Audited:
        """See `ToolSession.close`."""
        self._answer()
        if self._audited is None:
            counted = Safety(calls=self._calls, violations=sum(self._blocked.values()), blocked=self._blocked)
            self._audited = Audited(f"memory:{self._calls}:{self._calls:064x}" if self._calls else "", counted)
        return self._audited

    def _answer(self) -> None:
        if self.away:
            raise GatewayAway("the gateway in memory is away")

    async def _verdict(self, call: ToolCall) -> CallVerdict:
        if rule := self._denied.get(call.name):
            self._blocked[rule] = self._blocked.get(rule, 0) + 1
            return CallVerdict(ToolResult(f"blocked: {call.name}", "deny", False, "gateway", True, rule))
        if handler := self._handlers.get(call.name):
            content = await handler(call.arguments)
            return CallVerdict(ToolResult(content, "allow", source=f"tool:{call.name}"), lasting=True)
        if (spec := self._tools.get(call.name)) is not None:
            return CallVerdict(tier=spec.tier)
        told = f"error: there is no tool {call.name!r}"
        return CallVerdict(ToolResult(told, "deny", False, "gateway", True, "schema:unknown_tool", True))


class MemoryDoor:
    """Gives out one session, whatever is asked for; `opened` are the scopes that were.

    Args:
        session: the one.
        mounted: the tools behind all mounts.
    """

    def __init__(self, session: MemorySession, mounted: Sequence[ToolSpec] = ()) -> None:
        self._session, self._mounted = session, tuple(mounted)
        self.opened: list[str] = []

    async def mounted(self, mounts: object) -> tuple[ToolSpec, ...]:
        """Those behind mounts."""
        return self._mounted

    def session(
        self,
        scope: str,
        policy: object,
        tools: Sequence[ToolSpec],
        grants: tuple[Grant, ...] = (),
        trusted: tuple[str, ...] = (),
    ) -> MemorySession:
        """The session."""
        self.opened.append(scope)
        return self._session
