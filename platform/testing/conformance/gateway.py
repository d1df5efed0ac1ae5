"""What every `ToolGateway` must do. Run each function of `GATEWAY_SUITE` with a context of your own."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from headrace.platform.contracts import ToolGateway
from headrace.platform.records.message import ToolCall
from headrace.platform.testing.conformance.support import refusal


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
