import asyncio

import pytest

from headrace.platform.contracts import ToolResult
from headrace.platform.records import ToolCall
from headrace.platform.testing.conformance.gateway import GATEWAY_SUITE, GatewayContext
from headrace.platform.testing.conformance.support import run_suite
from headrace.platform.testing.fakes.gateway import MemoryGateway


def context(kind=MemoryGateway):
    made = []

    async def write(arguments):
        await asyncio.sleep(0)
        made.append(arguments)
        return f"wrote {arguments['text']}"

    return GatewayContext(
        make=lambda: kind({"write": write}),
        call=ToolCall("write", {"text": "hello"}, "call-0"),
        effects=lambda: len(made),
    )


@pytest.mark.parametrize("name", GATEWAY_SUITE)
async def test_the_fake_conforms(name):
    await GATEWAY_SUITE[name](context())


async def test_a_tool_that_fails_is_an_answer():
    async def broken(arguments):
        raise OSError("disk full")

    result = await MemoryGateway({"write": broken}).call(ToolCall("write"), "a")
    assert result == ToolResult("write failed: disk full", "allow", ok=False, source="write")


class ForgetsKeys(MemoryGateway):
    async def call(self, tool_call, key):
        self._calls.clear()
        return await super().call(tool_call, key)


class TakesAnyBody(MemoryGateway):
    async def call(self, tool_call, key):
        if key in self._calls:
            return await self._calls[key][1]
        return await super().call(tool_call, key)


class ByCall(MemoryGateway):
    async def call(self, tool_call, key):
        return await super().call(tool_call, str(tool_call))


class AllowsAll(MemoryGateway):
    async def _run(self, tool_call):
        handler = self._handlers.get(tool_call.name)
        return await super()._run(tool_call) if handler else ToolResult("done", "allow")


class GoesWithItsCaller(MemoryGateway):
    async def call(self, tool_call, key):
        if key not in self._calls:
            self._calls[key] = (tool_call, asyncio.ensure_future(self._run(tool_call)))
        return await self._calls[key][1]


@pytest.mark.parametrize(
    ("kind", "check", "message"),
    [
        (ForgetsKeys, "a_key_acts_once", "2 effects"),
        (ForgetsKeys, "a_key_in_flight_is_joined", "5 effects"),
        (TakesAnyBody, "a_key_belongs_to_one_call", "must raise"),
        (ByCall, "a_new_key_acts_again", "two keys had 1 effects"),
        (AllowsAll, "what_is_not_allowed_is_denied", "nobody allowed"),
    ],
)
async def test_the_suite_finds_what_is_wrong(kind, check, message):
    with pytest.raises(AssertionError, match=rf"{check}: .*{message}"):
        await run_suite({check: GATEWAY_SUITE[check]}, context(kind))


async def test_a_call_that_goes_with_its_caller_is_found():
    with pytest.raises(asyncio.CancelledError):
        await GATEWAY_SUITE["a_caller_that_leaves_does_not_undo"](context(GoesWithItsCaller))
