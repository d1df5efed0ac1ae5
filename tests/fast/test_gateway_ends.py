"""Nothing is begun for a session that is closed, or for a caller that does not wait any more; and the end says so."""

import argparse
import asyncio
import gc
import os
import time

import pytest
from gateways import FETCH, GRANTS, LOCAL_GRANTS, MOUNTS, OWN, SEND, Parts, client_of, listening, new_scope

from headrace.actors.gateway import assembly, process
from headrace.actors.gateway.decisions.approval_queue import questions, reply
from headrace.actors.gateway.decisions.approvals import Approvals
from headrace.actors.gateway.home import Home
from headrace.actors.gateway.judging import Judge
from headrace.actors.gateway.policy import CallBudgets, Policy
from headrace.actors.gateway.sessions import ABANDONED_S, ABSENT_S
from headrace.platform.errors import GatewayAway, InDoubt, NotFound, SafetyBlock
from headrace.platform.records import ToolCall
from headrace.platform.records.permissions import Grant
from headrace.platform.records.status import Capability

READ, WRITE = ToolCall("get", {"text": "a"}), ToolCall("put", {"text": "a"})
MOUNTED = Policy(grants=GRANTS, mounts=MOUNTS)
ASKING = Policy(grants=GRANTS, mounts=MOUNTS, approvals="./approve.py:yes", approval_s=0.1)


class Gate:
    """What waits until it may go on: as a tool, or as whoever approves."""

    def __init__(self):
        self.made, self.begun, self.go = 0, asyncio.Event(), asyncio.Event()

    async def __call__(self, arguments):
        self.made += 1
        await self._wait()
        return "done"

    async def decide(self, asked, state):
        await self._wait()

    async def _wait(self):
        self.begun.set()
        await self.go.wait()


class Effect:
    def __init__(self, spec):
        self.made, self.tools = 0, {spec.name: (spec, self)}

    async def __call__(self, arguments):
        self.made += 1
        return "done"


@pytest.fixture
def make(tmp_path):
    made = []

    def make(tools=None, **settings):
        made.append(Parts(tmp_path, tools, **settings))
        return made[-1]

    yield make
    for parts in made:
        parts.close()


def kinds(parts):
    return [(entry["kind"], entry.get("decision", ""), entry.get("rule", "")) for entry in parts.entries()]


# --- closed -----------------------------------------------------------------------------------------------------------


async def test_a_close_ends_what_waits_for_an_approval(make):
    effect, approver = Effect(SEND), Gate()
    parts = make(effect.tools)
    parts.pipeline._judge._approvals = approver
    session = parts.session(ASKING)
    turn = parts.pipeline.begin(session, (ToolCall("send"),), "t")
    await approver.begun.wait()
    audited = await parts.pipeline.close(session)
    approver.go.set()
    with pytest.raises(SafetyBlock, match="over"):
        await turn
    with pytest.raises(SafetyBlock, match="over"):  # nor by another try
        await parts.pipeline.decide(session, (ToolCall("send"),), "t")
    assert (effect.made, audited.safety.calls) == (0, 0)


async def test_a_close_ends_what_waits_for_its_rate(make):
    effect = Effect(FETCH)
    parts = make(effect.tools, deadline_s=1000.0)
    session = parts.session(Policy(grants=GRANTS, mounts=MOUNTS, budgets=CallBudgets(calls_per_s=0.01)))
    await parts.pipeline.decide(session, (ToolCall("fetch"),), "t")
    turn = parts.pipeline.begin(session, (ToolCall("fetch"),), "u")
    async with asyncio.timeout(5.0):
        audited = await parts.pipeline.close(session)
    with pytest.raises(SafetyBlock, match="over"):
        await turn
    assert (effect.made, audited.safety.calls) == (1, 1)


async def test_a_close_waits_for_what_is_being_performed(make):
    tool = Gate()
    parts = make({"send": (SEND, tool)})
    approver = parts.pipeline._judge._approvals = Gate()
    approver.go.set()
    session = parts.session(ASKING)
    turn = parts.pipeline.begin(session, (ToolCall("send"),), "t")
    await tool.begun.wait()
    closing = parts.pipeline.close(session)
    await asyncio.sleep(0)
    with pytest.raises(SafetyBlock, match="over"):
        parts.pipeline.begin(session, (READ,), "u")
    assert parts.performers.ended == [] and not closing.done()
    tool.go.set()
    audited = await closing
    assert (await turn)[0].result.content == "done" and audited.safety.calls == 1
    assert [kind for kind, _, _ in kinds(parts)] == ["open", "decision", "intent", "result", "close"]
    assert parts.performers.ended == [session.scope]


@pytest.mark.parametrize("call", [ToolCall("fetch"), WRITE])
async def test_what_is_closed_while_its_intent_goes_to_disk_is_not_begun(make, monkeypatch, call):  # P25
    effect = Effect(FETCH)
    parts = make(effect.tools)
    durable, disk = parts.audit.durable, asyncio.get_running_loop().create_future()
    asked = asyncio.Event()
    monkeypatch.setattr(parts.audit, "durable", lambda *args: asked.set() or disk)
    session = parts.session(MOUNTED)
    turn = parts.pipeline.begin(session, (call,), "t")
    await asked.wait()
    closing = parts.pipeline.close(session)
    await asyncio.sleep(0)
    monkeypatch.setattr(parts.audit, "durable", durable)
    disk.set_result(None)
    with pytest.raises(SafetyBlock, match="over"):
        await turn
    await closing
    assert effect.made == 0
    assert kinds(parts)[-2:] == [("result", "deny", "gateway:not_begun"), ("close", "", "")]


# --- late -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [ToolCall("fetch"), WRITE])
async def test_after_the_callers_deadline_nothing_is_begun(make, call):
    effect = Effect(FETCH)
    parts = make(effect.tools)
    session = parts.session(MOUNTED)
    with pytest.raises(GatewayAway, match="not decided in time"):
        await parts.pipeline.begin(session, (call,), "t", time.monotonic() - 1)
    assert effect.made == 0 and parts.journal.known(session.scope, "t") is None
    verdicts = await parts.pipeline.begin(session, (call,), "t", time.monotonic() + 60)  # it may be tried again
    assert len(verdicts) == 1


async def test_what_a_client_was_told_is_not_done_is_not_done_later(make):
    effect, approver = Effect(SEND), Gate()
    parts = make(effect.tools)
    parts.pipeline._judge._approvals = approver
    async with listening(parts) as running:
        client = client_of(parts, deadline_s=0.1)
        session = client.session(new_scope(), ASKING, OWN)
        with pytest.raises(GatewayAway, match="did not answer"):
            await session.decide((ToolCall("send"),), "t")
        assert approver.begun.is_set()
        approver.go.set()
        await asyncio.wait(set(running._tasks))
        await client.close()
    assert effect.made == 0


# --- lost -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [ToolCall("fetch"), WRITE])
async def test_after_a_restart_what_was_not_begun_is_decided_anew(make, monkeypatch, call):  # P25
    effect = Effect(FETCH)
    parts = make(effect.tools)
    durable, disk, asked = parts.audit.durable, asyncio.get_running_loop().create_future(), asyncio.Event()
    monkeypatch.setattr(parts.audit, "durable", lambda *args: asked.set() or disk)
    session, now = parts.session(MOUNTED), time.monotonic()
    monkeypatch.setattr(parts.pipeline, "_clock", lambda: now)
    turn = parts.pipeline.begin(session, (call,), "t", now + 1.0)
    await asked.wait()
    assert parts.journal.known(session.scope, "t").state == "intent"
    now += 2.0  # while the disk was busy, whoever asked has given up
    monkeypatch.setattr(parts.audit, "durable", durable)
    disk.set_result(None)
    with pytest.raises(GatewayAway, match="not decided in time"):
        await turn
    assert effect.made == 0
    parts.restart()
    assert kinds(parts)[-1] == ("result", "deny", "gateway:not_begun")
    assert parts.journal.known(session.scope, "t").state == "not_begun"
    again = parts.session(MOUNTED, resumed=True, calls_before=1)
    with pytest.raises(ValueError, match="other calls"):
        await parts.pipeline.decide(again, (READ,), "t")
    (verdict,) = await parts.pipeline.decide(again, (call,), "t")
    assert (effect.made, verdict.result is None) == ((1, False) if call.name == "fetch" else (0, True))
    parts.restart()  # and now there is an effect
    assert parts.journal.known(session.scope, "t").state == ("decided" if call.name == "fetch" else "intent")
    if call is WRITE:
        with pytest.raises(InDoubt):
            await parts.pipeline.decide(parts.session(MOUNTED, resumed=True, calls_before=1), (call,), "t")


async def test_what_was_not_begun_may_be_asked_for_again_in_the_same_process(make, monkeypatch):  # P25
    effect = Effect(FETCH)
    parts = make(effect.tools)
    durable, disk, asked = parts.audit.durable, asyncio.get_running_loop().create_future(), asyncio.Event()
    monkeypatch.setattr(parts.audit, "durable", lambda *args: asked.set() or disk)
    session, now = parts.session(MOUNTED), time.monotonic()
    monkeypatch.setattr(parts.pipeline, "_clock", lambda: now)
    turn = parts.pipeline.begin(session, (ToolCall("fetch"),), "t", now + 1.0)
    await asked.wait()
    now += 2.0
    monkeypatch.setattr(parts.audit, "durable", durable)
    disk.set_result(None)
    with pytest.raises(GatewayAway):
        await turn
    (verdict,) = await parts.pipeline.decide(session, (ToolCall("fetch"),), "t")
    assert verdict.result.content == "done" and effect.made == 1


async def test_a_session_without_a_connection_is_kept_as_long_as_a_turn_of_it_runs(make):
    tool = Gate()
    parts = make({"send": (SEND, tool)})
    approver = parts.pipeline._judge._approvals = Gate()
    approver.go.set()
    now = time.monotonic()
    async with listening(parts) as running:
        running.sessions._clock = lambda: now
        client, other = client_of(parts), client_of(parts)
        scope = new_scope()
        session = client.session(scope, ASKING, OWN)
        deciding = asyncio.ensure_future(session.decide((ToolCall("send"),), "t"))
        await tool.begun.wait()
        for each in list(running.connections):  # the client is killed
            each.abort("killed")
        deciding.cancel()
        await client.close()
        while running.sessions.find(scope).connections:  # noqa: ASYNC110 - the loop tells the connection
            await asyncio.sleep(0)
        for _ in range(3):
            now += ABANDONED_S - 1.0
            running.sweep()
        kept = running.sessions.find(scope)
        assert kept is not None and kept.turns["t"].running is not None
        tool.go.set()
        await asyncio.wait({kept.turns["t"].running})
        again = other.session(scope, ASKING, OWN)  # whoever comes back for it finds what was done
        (verdict,) = await again.decide((ToolCall("send"),), "t")
        assert verdict.result.content == "done" and tool.made == 1
        await other.close()
        while kept.connections:  # noqa: ASYNC110
            await asyncio.sleep(0)
        running.sweep()
        assert running.sessions.find(scope) is kept
        now += ABANDONED_S + 1.0
        running.sweep()
        assert running.sessions.find(scope) is None
        await asyncio.wait(set(running._tasks))
        assert parts.performers.ended == [scope]  # nobody closed it, and nothing is held for it


async def test_a_question_of_a_caller_that_is_gone_disappears(make):
    parts = make(Effect(SEND).tools)
    folder, now = parts.folder / "home" / "approvals", time.monotonic()
    policy = Policy(grants=GRANTS, mounts=MOUNTS, approvals="queue", approval_s=3600.0)
    async with listening(parts) as running:
        running.sessions._clock = lambda: now
        client, other, scope = client_of(parts), client_of(parts), new_scope()
        deciding = asyncio.ensure_future(client.session(scope, policy, OWN).decide((ToolCall("send"),), "t"))
        first = await asked_question(folder)
        deciding.cancel()
        await client.close()
        while (session := running.sessions.find(scope)).connections:  # noqa: ASYNC110
            await asyncio.sleep(0)
        now += ABSENT_S - 1.0
        running.sweep()  # it may come back
        assert questions(folder, time.time()) == [first]
        now += 2.0
        turn = session.turns["t"].running
        running.sweep()
        await asyncio.wait({turn})
        assert list(folder.iterdir()) == [] and session.turns == {}
        deciding = asyncio.ensure_future(other.session(scope, policy, OWN).decide((ToolCall("send"),), "t"))
        second = await asked_question(folder)  # it came back after all: the question is another one
        assert second.question_id != first.question_id
        with pytest.raises(NotFound):
            reply(folder, first.question_id, True, time.time())
        reply(folder, second.question_id, True, time.time())
        assert (await deciding)[0].result.content == "done"
        await other.close()


async def asked_question(folder):
    async with asyncio.timeout(10.0):
        while not (found := questions(folder, time.time())):  # noqa: ASYNC110 - it is a file
            await asyncio.sleep(0.01)
    return found[0]


async def test_the_rate_is_waited_for_once_a_turn_and_what_it_denies_costs_nothing(make, tmp_path):
    parts = make()
    session = parts.session(
        Policy(grants=(Grant(Capability.READ, uses=9),), budgets=CallBudgets(calls_per_s=100.0, calls=9))
    )
    judge = Judge(Approvals(tmp_path), 0.025, lambda: 0.0)  # the calls could be made after 0, 10, 20, ... ms
    asked = parts.pipeline._asked(session.state(0.0), (READ,) * 5, "t")
    decided = await judge.slowly(asked, session)
    assert [denial and denial.rule for _, denial in decided] == [None, None] + ["budget:rate"] * 3
    assert (session.begun.calls, session.begun.uses) == (2, {0: 2})


# --- a disk that fails ------------------------------------------------------------------------------------------------


def no_space(file):
    raise OSError(28, "No space left on device")


async def test_a_close_without_an_audit_is_no_last_word(make):
    parts = make()
    async with listening(parts):
        client = client_of(parts, deadline_s=5.0)
        session = client.session(new_scope(), Policy(grants=LOCAL_GRANTS), OWN)
        await session.decide((READ,), "t")
        parts.audit._writer._sync = no_space
        for _ in range(2):
            with pytest.raises(GatewayAway, match="No space"):
                await session.close()
        assert parts.pipeline.failure is not None
        refused = client.session(new_scope(), Policy(grants=LOCAL_GRANTS), OWN)  # of which not even a call is written
        with pytest.raises(GatewayAway):
            await refused.decide((READ,), "t")
        with pytest.raises(GatewayAway):
            await refused.close()
        await client.close()
    with pytest.raises(OSError, match="No space"):
        parts.close()


async def test_a_process_without_an_audit_ends(tmp_path, monkeypatch):
    made = []
    assemble = assembly.assemble
    monkeypatch.setattr(assembly, "assemble", lambda *args: made.append(assemble(*args)) or made[-1])
    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.setattr(gc, "set_threshold", lambda *args: None)
    home = Home(tmp_path / "home")
    arguments = argparse.Namespace(audit=tmp_path / "audit", flush_s=0.01, deadline_s=1.0, mode="group", linger_s=0.2)
    reader, writer = os.pipe()
    serving = asyncio.ensure_future(process._serve(home, arguments, writer, None))
    await asyncio.to_thread(os.read, reader, 10)
    (gateway,) = made
    gateway.audit._writer._sync = no_space
    gateway.audit.append("open", "run/0/0#a")
    with pytest.raises(OSError, match="No space"):
        async with asyncio.timeout(20.0):
            await serving
    os.close(reader)
