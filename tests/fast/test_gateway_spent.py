"""What calls have used up elsewhere, in a process that is gone or on the record of a replay, is not granted again."""

import asyncio

import pytest
from gateways import GRANTS, LOCAL_GRANTS, MOUNTS, OWN, PUT, Parts, client_of, listening, new_scope

from headrace.actors.gateway import server
from headrace.actors.gateway.policy import CallBudgets, Policy
from headrace.actors.gateway.protocol import Recorded
from headrace.actors.gateway.sessions import RECORD, digest_of
from headrace.platform.contracts import ToolOutput
from headrace.platform.records import ToolCall, ToolSpec
from headrace.platform.records.permissions import Grant
from headrace.platform.records.status import Capability

READ, WRITE, FETCH = ToolCall("get", {"text": "a"}), ToolCall("put", {"text": "a"}), ToolCall("fetch", {"text": "a b"})
READS = Grant(Capability.READ)
PRICED = (OWN[0], ToolSpec("put", PUT.description, PUT.parameters, PUT.capability, PUT.tier, price=1))
LIMITED = [
    (Policy(grants=(READS, Grant(Capability.WRITE, uses=2))), "capability:uses"),
    (Policy(grants=LOCAL_GRANTS, budgets=CallBudgets(writes=2)), "tier:writes"),
    (Policy(grants=LOCAL_GRANTS, budgets=CallBudgets(calls_of={"put": 2})), "budget:calls_of"),
    (Policy(grants=LOCAL_GRANTS, budgets=CallBudgets(money=2.5)), "budget:money"),
    (Policy(grants=LOCAL_GRANTS, budgets=CallBudgets(calls=2)), "budget:calls"),
]


@pytest.fixture
def parts(tmp_path):
    async def fetch(arguments):
        return "a page"

    made = Parts(tmp_path, {"fetch": (ToolSpec("fetch", capability=Capability.NETWORK), fetch)})
    yield made
    made.close()


async def put(session, key):
    """Make a call; by what rule it was denied."""
    (verdict,) = await session.decide((WRITE,), key)
    if verdict.result is not None:
        return verdict.result.rule
    await session.settle((ToolOutput("done"),), key)
    return ""


@pytest.mark.parametrize(("policy", "rule"), LIMITED)
async def test_a_new_process_grants_only_what_is_left(parts, policy, rule):
    client = client_of(parts)
    session = client.session(new_scope(), policy, PRICED)
    async with listening(parts):
        assert await put(session, "t") == ""
        assert await put(session, "t") == ""  # again: it counts once
    parts.restart()
    async with listening(parts):
        assert [await put(session, "u"), await put(session, "v")] == ["", rule]
    parts.restart()
    async with listening(parts):
        assert await put(session, "w") == rule
        await client.close()


async def test_a_grant_does_not_begin_anew_with_the_process(parts):
    policy = Policy(grants=(Grant(Capability.READ, expires_s=60.0),))
    client = client_of(parts)
    session = client.session(new_scope(), policy, OWN)
    async with listening(parts):
        await session.decide((READ,), "t")
    session._opened.began_s -= 100
    parts.restart()
    async with listening(parts):
        (verdict,) = await session.decide((READ,), "u")
        assert verdict.result.rule == "capability:expired"
        await client.close()


async def test_an_answer_from_the_journal_counts_and_is_untrusted(parts):  # P25
    policy = Policy(grants=(*LOCAL_GRANTS, Grant(Capability.NETWORK, uses=1)), mounts=MOUNTS)
    await parts.pipeline.decide(parts.session(policy), (FETCH,), "t")
    parts.restart()
    session = parts.session(policy, resumed=True)  # whose first answer never came
    await parts.pipeline.decide(session, (FETCH,), "t")
    assert (session.begun.calls, session.begun.uses) == (1, {2: 1})
    assert [source for _, source in session.begun.seen] == ["tool:fetch"]


# --- recorded ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "rule"), LIMITED)
@pytest.mark.parametrize("begun", [True, False])
async def test_calls_on_the_record_count_as_if_they_had_been_allowed(parts, policy, rule, begun):
    client = client_of(parts)
    async with listening(parts):
        session = client.session(new_scope(), policy, PRICED)
        if begun:
            assert await put(session, "t") == ""
            session.recorded((WRITE,))
        else:
            session.recorded((WRITE, WRITE))
        assert await put(session, "u") == rule
        audited = await session.close()
        assert audited.safety.calls == 1 + begun  # those of the record were not decided here
        await client.close()
    assert [entry["name"] for entry in parts.entries() if entry["kind"] == "recorded"] == ["put"] * (2 - begun)
    assert [entry["kind"] for entry in parts.entries()].count("open") == 1


async def test_a_session_of_recorded_calls_alone_names_an_entry(parts):
    client = client_of(parts)
    async with listening(parts):
        session = client.session(new_scope(), Policy(grants=LOCAL_GRANTS, mounts=MOUNTS), OWN)
        session.recorded((FETCH, ToolCall("words of the model", {"n": 2**80})))
        session.recorded(())
        audited = await session.close()
        await client.close()
    assert audited.head and audited.safety.calls == 0
    assert [(entry["kind"], entry.get("name")) for entry in parts.entries()] == [
        ("open", None),
        ("recorded", None),  # of a tool that is not loaded yet, and of none
        ("recorded", None),
        ("close", None),
    ]


@pytest.mark.parametrize("begun", [True, False])
async def test_what_a_record_showed_may_have_been_anything(parts, begun):
    client = client_of(parts)
    policy = Policy(grants=GRANTS, mounts=MOUNTS, taint=(Capability.NETWORK,))
    async with listening(parts):
        session = client.session(new_scope(), policy, OWN)
        if begun:
            assert (await session.decide((FETCH,), "t"))[0].result.rule == ""
        session.recorded((READ,))
        session.recorded((READ,))
        (verdict,) = await session.decide((FETCH,), "u")
        assert (verdict.result.rule, verdict.taint) == ("taint:network", (RECORD,))
        await client.close()


@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("restarts", [True, False])
async def test_calls_on_the_record_count_once_however_often_they_come(parts, monkeypatch, after, restarts):
    came = asyncio.Event()
    received = server.Connection.received

    def breaking(self, message):
        if not isinstance(message, Recorded) or came.is_set():
            received(self, message)
            return
        came.set()
        if after:
            received(self, message)
        self.abort("lost")

    monkeypatch.setattr(server.Connection, "received", breaking)
    client = client_of(parts)
    policy = Policy(grants=LOCAL_GRANTS, budgets=CallBudgets(writes=4))
    async with listening(parts):
        session = client.session(new_scope(), policy, OWN)
        assert await put(session, "t") == ""
        session.recorded((WRITE, READ))
        await came.wait()
        if not restarts:
            assert await put(session, "u") == ""
    if restarts:
        parts.restart()
    async with listening(parts):
        rules = [await put(session, f"v{index}") for index in range(3)]
        assert rules == (["", "", "tier:writes"] if restarts else ["", "tier:writes", "tier:writes"])
        await client.close()


# --- what is known of each other --------------------------------------------------------------------------------------


async def test_numbers_are_what_they_are_on_the_other_side(parts):
    whole = Policy(approval_s=30, budgets=CallBudgets(money=1))
    assert whole.digest == Policy(approval_s=30.0, budgets=CallBudgets(money=1.0)).digest
    assert digest_of(Policy(), (ToolSpec("get", price=1),)) == digest_of(Policy(), (ToolSpec("get", price=1.0),))
    client = client_of(parts)
    async with listening(parts):
        tools = (ToolSpec("get", price=1, parameters={"required": ("text",)}),)
        (verdict,) = await client.session(new_scope(), Policy(grants=LOCAL_GRANTS), tools).decide((READ,), "t")
        assert verdict.result is None
        await client.close()


async def test_what_is_over_is_not_kept(parts, monkeypatch):
    monkeypatch.setattr("headrace.actors.gateway.link._MOST_LEARNED", 3)
    monkeypatch.setattr("headrace.actors.gateway.server._MOST_LEARNED", 4)
    client = client_of(parts)
    policy = Policy(grants=LOCAL_GRANTS)
    async with listening(parts) as running:
        for number in [*range(8), 0, 7, 6, 1]:  # of which some have to be learnt again
            session = client.session(new_scope(), policy, (ToolSpec("get", description=f"task {number}"),))
            assert (await session.decide((READ,), "t"))[0].result is None
            await session.settle((ToolOutput("text"),), "t")
            await session.close()
        link, (connection,) = client.link(), running.connections
        assert (len(link._opened), len(link._learned), len(connection._learned)) == (0, 3, 4)
        now = running.sessions._clock() + 1000
        running.sessions._clock = lambda: now
        running.sessions.sweep()
        assert set(running._learned) == set(connection._learned)
        await client.close()


async def test_a_client_that_left_while_it_closed_keeps_nothing(parts):
    client = client_of(parts)
    async with listening(parts):
        session = client.session(new_scope(), Policy(grants=LOCAL_GRANTS), OWN)
        await session.decide((READ,), "t")
        leaving = asyncio.ensure_future(session.close())
        await asyncio.sleep(0)
        leaving.cancel()
        await client.session(new_scope(), Policy(grants=LOCAL_GRANTS), OWN).decide((WRITE,), "t")
        assert session._opened not in client.link()._opened
        await client.close()
