"""What every `ToolGateway` and every `ToolSession` must do.

Run each function of `GATEWAY_SUITE` and of `SESSION_SUITE` with a context of your own. `SessionGateway` makes a session
into a gateway of single calls, so that the first suite runs against sessions too.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.platform.contracts import ToolGateway, ToolOutput, ToolResult, ToolSession
from headrace.platform.records.message import ToolCall
from headrace.platform.testing.conformance.support import refusal

Perform = Callable[[dict[str, Any]], Awaitable[str]]


class SessionGateway:
    """Single calls of a session: decide, perform where the session does not, settle.

    Args:
        session: of one episode.
        tools: those that the caller performs, by name.
    """

    def __init__(self, session: ToolSession, tools: Mapping[str, Perform] = {}) -> None:
        self._session, self._tools = session, dict(tools)

    async def call(self, tool_call: ToolCall, key: str) -> ToolResult:
        """See `ToolGateway.call`. Raises as `ToolSession.decide`."""
        (verdict,) = await self._session.decide((tool_call,), key)
        if verdict.result is not None:
            return verdict.result
        output = ToolOutput(await self._tools[tool_call.name](tool_call.arguments))
        (result,) = await self._session.settle((output,), key)
        return result


@dataclass(kw_only=True, slots=True, frozen=True)
class GatewayContext:
    """What the suite runs against.

    `make` returns a fresh gateway; `call` is one that it allows, and `effects` counts how often such a call has had
    its effect, over all gateways of this context.
    """

    make: Callable[[], ToolGateway]
    call: ToolCall
    effects: Callable[[], int]


async def a_key_acts_once(context: GatewayContext) -> None:
    """A retry attaches to the first result (case X3)."""
    gateway, before = context.make(), context.effects()
    first = await gateway.call(context.call, "a")
    again = await gateway.call(context.call, "a")
    assert first.ok, f"the allowed call was not made: {first}"
    assert again == first, f"the same key gave {first} and then {again}"
    assert context.effects() - before == 1, f"one key had {context.effects() - before} effects"


async def a_new_key_acts_again(context: GatewayContext) -> None:
    """An identical call under a new key is another call (case X3)."""
    gateway, before = context.make(), context.effects()
    await gateway.call(context.call, "a")
    await gateway.call(context.call, "b")
    assert context.effects() - before == 2, f"two keys had {context.effects() - before} effects"


async def a_key_in_flight_is_joined(context: GatewayContext) -> None:
    """Two at once under one key are one call (P25)."""
    gateway, before = context.make(), context.effects()
    results = await asyncio.gather(*(gateway.call(context.call, "a") for _ in range(5)))
    assert all(result == results[0] for result in results), f"one key gave different results: {results}"
    assert context.effects() - before == 1, f"five calls at once under one key had {context.effects() - before} effects"


async def a_key_belongs_to_one_call(context: GatewayContext) -> None:
    """The same key with another body is a conflict (P25)."""
    gateway = context.make()
    await gateway.call(context.call, "a")
    other = msgspec.structs.replace(context.call, arguments={**context.call.arguments, "another": 1})
    error = await refusal(lambda: gateway.call(other, "a"))
    assert error is not None, "the same key with other arguments was accepted; it must raise"


async def what_is_not_allowed_is_denied(context: GatewayContext) -> None:
    """Deny by default: the answer says so and nothing happens."""
    gateway, before = context.make(), context.effects()
    result = await gateway.call(ToolCall("no_such_tool", {}, "c"), "a")
    assert not result.ok, f"a tool that nobody allowed was called: {result}"
    assert result.decision and result.decision != "allow", f"the decision on an unknown tool is {result.decision!r}"
    assert result.content, "a denied call gives the model no reason"
    assert context.effects() == before, "a denied call had an effect"


async def results_are_not_trusted(context: GatewayContext) -> None:
    """What comes from outside says where from, and is not taken for the platform's own words."""
    result = await context.make().call(context.call, "a")
    assert result.decision == "allow", f"the decision on an allowed call is {result.decision!r}"
    assert result.source, "a result does not say where it is from"
    assert not result.trusted, "a tool's output is not trusted"


async def a_caller_that_leaves_does_not_undo(context: GatewayContext) -> None:
    """Whoever comes back with the key finds the one result."""
    gateway, before = context.make(), context.effects()
    running = asyncio.ensure_future(gateway.call(context.call, "a"))
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running])
    result = await gateway.call(context.call, "a")
    assert result.ok, f"after a cancelled caller the key gives {result}"
    assert context.effects() - before == 1, f"a cancelled caller and a retry had {context.effects() - before} effects"


GATEWAY_SUITE: dict[str, Callable[[GatewayContext], Awaitable[None]]] = {
    check.__name__: check
    for check in (
        a_key_acts_once,
        a_new_key_acts_again,
        a_key_in_flight_is_joined,
        a_key_belongs_to_one_call,
        what_is_not_allowed_is_denied,
        results_are_not_trusted,
        a_caller_that_leaves_does_not_undo,
    )
}


@dataclass(kw_only=True, slots=True, frozen=True)
class SessionContext:
    """What the suite of sessions runs against.

    `make` returns a session of a fresh episode that allows `call`, which the caller has to perform, and denies
    `denied` by a rule.
    """

    make: Callable[[], ToolSession]
    call: ToolCall
    denied: ToolCall


async def what_is_allowed_is_left_to_the_caller(context: SessionContext) -> None:
    """Its output comes back as a result that is not trusted and says where it is from."""
    session = context.make()
    (verdict,) = await session.decide((context.call,), "a")
    assert verdict.result is None, f"an allowed call of the caller's came back with {verdict.result}"
    (result,) = await session.settle((ToolOutput("some text"),), "a")
    assert (result.content, result.decision, result.ok) == ("some text", "allow", True), f"it was settled as {result}"
    assert result.source and not result.trusted, f"the result of a tool is {result}"
    await session.close()


async def a_turn_is_answered_in_the_order_of_its_calls(context: SessionContext) -> None:
    """Verdicts stand beside calls, and results beside outputs."""
    session = context.make()
    verdicts = await session.decide((context.denied, context.call, context.denied, context.call), "a")
    assert [each.result is None for each in verdicts] == [False, True, False, True], f"the verdicts are {verdicts}"
    results = await session.settle((ToolOutput("first"), ToolOutput("second", ok=False)), "a")
    assert [(each.content, each.ok) for each in results] == [("first", True), ("second", False)], f"results: {results}"
    await session.close()


async def a_denial_is_told_and_counted(context: SessionContext) -> None:
    """The model gets a reason, the record a rule."""
    session = context.make()
    (verdict,) = await session.decide((context.denied,), "a")
    denied = verdict.result
    assert denied is not None and not denied.ok and denied.decision == "deny", f"a denied call came back as {verdict}"
    assert denied.content and denied.rule and not denied.invalid, f"a denial says {denied}"
    safety = (await session.close()).safety
    assert (safety.violations, safety.blocked) == (1, {denied.rule: 1}), f"one denial was counted as {safety}"


async def a_turn_that_comes_again_is_the_same_turn(context: SessionContext) -> None:
    """Same key, same verdicts; other calls are a conflict (P25)."""
    session = context.make()
    first = await session.decide((context.call, context.denied), "a")
    again = await session.decide((context.call, context.denied), "a")
    assert list(first) == list(again), f"the same turn was decided as {first} and then as {again}"
    error = await refusal(lambda: session.decide((context.denied,), "a"))
    assert error is not None, "the same key with other calls was decided; it must raise"
    safety = (await session.close()).safety
    assert (safety.calls, safety.violations) == (2, 1), f"a turn that came twice was counted as {safety}"


async def the_last_word_is_said_once(context: SessionContext) -> None:
    """Closing twice is safe, and nothing is decided after it."""
    session = context.make()
    await session.decide((context.call,), "a")
    await session.settle((ToolOutput("some text"),), "a")
    first = await session.close()
    assert first.head, "an episode that called a tool has no head of the audit"
    assert await session.close() == first, "closing twice gives two last words"
    error = await refusal(lambda: session.decide((context.call,), "b"))
    assert error is not None, "a call after the end was decided; it must raise"


SESSION_SUITE: dict[str, Callable[[SessionContext], Awaitable[None]]] = {
    check.__name__: check
    for check in (
        what_is_allowed_is_left_to_the_caller,
        a_turn_is_answered_in_the_order_of_its_calls,
        a_denial_is_told_and_counted,
        a_turn_that_comes_again_is_the_same_turn,
        the_last_word_is_said_once,
    )
}
