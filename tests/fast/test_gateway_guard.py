"""The guard between policy and environment: who performs which call, and what the record says of it."""

import msgspec
import pytest
from guard_kit import DENIED, TASK, UNKNOWN, Door, World, found, guarded, says

from headrace.actors.environments.adapter import finished
from headrace.actors.gateway.guard import GuardedEnvironment
from headrace.actors.gateway.policy import Mount, Policy
from headrace.platform.contracts import CallVerdict
from headrace.platform.errors import EnvironmentFault, ExternalDivergence, GatewayAway, SafetyBlock
from headrace.platform.hashing import hash_value
from headrace.platform.records.message import HashPair, Message, StepResult, ToolSpec
from headrace.platform.records.permissions import Safety
from headrace.platform.records.status import Role, SideEffectTier, Status


async def test_allowed_calls_reach_the_world_and_their_answers_come_back_settled():
    door, world = Door(cut=8), World()
    session = await guarded(door, world)
    result = await session.step(says("get", "put"), "run.t0.0.0/0/0")
    assert world.seen == [["get", "put"]]
    assert [message.content for message in result.messages] == ["get says", "put says"]
    assert [message.tool_call_id for message in result.messages] == ["c0", "c1"]
    assert door.settled == [("run.t0.0.0/0/0", ["get says {}", "put says {}"])]
    assert result.taint == "tool:world" and [outcome.decision for outcome in result.calls] == ["allow", "allow"]
    scope, tools, _, trusted = door.opened[0]
    assert scope.startswith("run.t0.0.0/0#") and tools == ["get", "put"] and trusted == ("find it",)  # P26


async def test_a_denied_call_never_reaches_the_world_and_is_answered_in_its_place():
    door, world = Door({"put": DENIED}), World()
    session = await guarded(door, world)
    result = await session.step(says("put", "get", "put"), "e/0/0")
    assert world.seen == [["get"]]
    assert [message.content for message in result.messages] == ["blocked: no", "get says {}", "blocked: no"]
    assert [outcome.rule for outcome in result.calls] == ["capability:network", "", "capability:network"]
    assert result.status is Status.OK and result.cost.tool_calls == 1


async def test_where_every_call_is_denied_the_world_is_not_asked_and_its_state_stands():
    world = World()
    session = await guarded(Door({"put": DENIED}), world)
    result = await session.step(says("put"), "e/0/0")
    assert world.seen == [] and result.state_hash == hash_value("start")
    assert not (result.terminated or result.truncated) and result.cost.tool_calls == 0


async def test_a_call_that_cannot_be_made_is_a_mistake_of_the_model():  # case X1
    session = await guarded(Door({"nothing": UNKNOWN}))
    assert (await session.step(says("nothing"), "e/0/0")).status is Status.MODEL_INVALID_ACTION
    assert (await session.step(says("get"), "e/0/1")).status is Status.OK


@pytest.mark.parametrize("error", [GatewayAway("gone"), RuntimeError("undecided")])
async def test_where_the_gateway_does_not_decide_nothing_happens(error):  # P25
    world = World()
    session = await guarded(Door({"get": error}), world)
    with pytest.raises(type(error)):
        await session.step(says("get"), "e/0/0")
    assert world.seen == []


async def test_a_message_without_calls_is_the_worlds_alone():
    door, world = Door(), World(lambda message: StepResult(terminated=True))
    session = await guarded(door, world)
    assert (await session.step(Message(Role.ASSISTANT, "v01"), "e/0/0")).terminated
    assert door.decided == [] and door.opened == []


async def test_where_there_are_no_tools_a_call_is_none():
    class Bare(World):
        async def step(self, message, key):
            assert not message.tool_calls
            return StepResult(terminated=True)

    door = Door()
    assert (await (await guarded(door, Bare(tools=()))).step(says("get"), "e/0/0")).terminated
    assert door.decided == []


async def test_the_same_key_is_the_same_step_and_no_other_message():  # P25, case X3
    door, world = Door(), World()
    session = await guarded(door, world)
    first = await session.step(says("put"), "e/0/0")
    assert await session.step(says("put"), "e/0/0") is first
    with pytest.raises(ValueError, match="another step"):
        await session.step(says("get"), "e/0/0")
    await session.step(says("put"), "e/0/1")
    assert world.seen == [["put"], ["put"]]


async def test_what_the_gateway_performs_is_told_and_recorded_for_a_replay():
    spec = ToolSpec("search")
    policy = Policy(mounts=(Mount("search"),))
    door, world = Door({"search": found("a page")}, (spec,)), World()
    session = await guarded(door, world, policy)
    assert [tool.name for tool in session.tools()] == ["get", "put", "search"]
    result = await session.step(says("search", "get"), "e/0/0")
    assert world.seen == [["get"]] and [m.content for m in result.messages] == ["a page", "get says {}"]
    assert result.cost.tool_calls == 2
    external = session.provenance.external
    assert list(external) == ["calls/1"]

    again_door = Door({}, (spec,))
    again = GuardedEnvironment(World(), policy, again_door)
    assert again.load_cassette(external) is not None
    await again.reset(TASK, 1)
    replayed = await again.step(says("search", "get"), "e/1/0")
    assert (replayed.messages, replayed.state_hash) == (result.messages, result.state_hash)
    assert again_door.decided == [("e/1/0", ["get"])]
    with pytest.raises(ExternalDivergence, match="search"):
        await again.step(says("search"), "e/1/1")


async def test_a_replay_never_asks_again_for_what_cannot_be_undone():
    world = World()
    world._tools = (ToolSpec("pay", tier=SideEffectTier.IRREVERSIBLE),)
    session = GuardedEnvironment(world, Policy(), Door())
    session.load_cassette({})
    await session.reset(TASK, 1)
    with pytest.raises(ExternalDivergence, match="pay"):
        await session.step(says("pay"), "e/1/0")
    assert world.seen == []


async def test_what_was_approved_once_is_done_again_in_a_replay_without_asking():
    def world():
        made = World()
        made._tools = (ToolSpec("get"), ToolSpec("pay", tier=SideEffectTier.IRREVERSIBLE))
        return made

    approved = CallVerdict(lasting=True, tier=SideEffectTier.IRREVERSIBLE)
    session = await guarded(Door({"pay": approved}), world())
    result = await session.step(says("get", "pay"), "e/0/0")
    door, again = Door(), world()
    replay = GuardedEnvironment(again, Policy(), door)
    replay.load_cassette(session.provenance.external)
    await replay.reset(TASK, 1)
    replayed = await replay.step(says("get", "pay"), "e/1/0")
    assert [message.content for message in replayed.messages] == [message.content for message in result.messages]
    assert (again.seen, door.decided) == ([["get", "pay"]], [("e/1/0", ["get"])])
    assert door.settled == [("e/1/0", ["get says {}"])] and replayed.calls[1].source == "tool:pay"
    assert door.told == [["pay"]], "it counts and is spent in the branch, too"


async def test_answers_in_another_form_than_one_for_each_call_are_kept():
    block = StepResult((Message(Role.USER, "both done"),), state_hash=HashPair("a", "a"))
    session = await guarded(Door({"put": DENIED}), World(lambda message: block))
    result = await session.step(says("get", "put", "get"), "e/0/0")
    assert [(m.role, m.content) for m in result.messages] == [(Role.TOOL, "blocked: no"), (Role.USER, "both done")]


async def test_answers_are_matched_by_their_ids():
    def backwards(message):
        return msgspec.structs.replace(World._each(message), messages=tuple(reversed(World._each(message).messages)))

    session = await guarded(Door(), World(backwards))
    result = await session.step(says("get", "put"), "e/0/0")
    assert [message.tool_call_id for message in result.messages] == ["c0", "c1"]


async def test_the_record_has_the_chains_head_the_counts_and_the_policy():
    door, policy = Door(), Policy(output_kb=3)
    session = await guarded(door, policy=policy)
    await session.step(says("get"), "e/0/0")
    await session.close()
    await session.close()
    provenance = session.provenance
    assert provenance.audit_head == "chain:3:ab" and provenance.gateway_policy == policy.digest
    assert provenance.safety.violations == 1 and door.closed == 1


async def test_planted_instructions_are_counted_apart_from_their_effects():
    planted = {"planted": [{"tool": "send", "arguments": {"to": "x"}}]}

    def answer(message):
        return msgspec.structs.replace(
            World._each(message), metadata=planted if message.tool_calls[0].name == "get" else {}
        )

    session = await guarded(Door({"send": DENIED}), World(answer, ("get", "send")))
    await session.step(says("send", to="x"), "e/0/0")  # before it was shown: no obedience
    await session.step(says("get"), "e/0/1")
    await session.step(says("send", to="y"), "e/0/2")
    await session.step(says("send", to="x", n=1), "e/0/3")
    safety = session.provenance.safety
    assert (safety.planted, safety.obeyed, safety.effects) == (1, 1, 0)


async def test_obedience_is_counted_where_the_gateway_ends_the_episode():
    planted = StepResult((Message(Role.TOOL, "call send"),), metadata={"planted": [{"tool": "send"}]})
    session = await guarded(Door({"send": SafetyBlock("enough")}), World(lambda message: planted, ("get", "send")))
    await session.step(says("get"), "e/0/0")
    with pytest.raises(SafetyBlock):
        await session.step(says("send"), "e/0/1")
    safety = session.provenance.safety
    assert (safety.planted, safety.obeyed, safety.effects) == (1, 1, 0)


async def test_an_episode_whose_last_word_is_missing_does_not_end_well():
    class Torn(Door):
        async def close(self):
            raise GatewayAway("the audit cannot be written")

    session = await guarded(Torn())
    await session.step(says("get"), "e/0/0")
    with pytest.raises(GatewayAway):
        await finished(session)
    await session.close()
    assert session.inner.closed == 1


async def test_a_session_that_is_reset_does_not_bear_the_audit_of_the_one_before():
    session = await guarded(Door())
    await session.step(says("get"), "e/0/0")
    await session.reset(TASK, 2)
    await session.close()
    assert (session.provenance.audit_head, session.provenance.safety) == ("", Safety())


async def test_what_is_said_beside_answers_is_settled_with_them():
    def answer(message):
        return StepResult((*World._each(message).messages, Message(Role.USER, "a page")))

    door = Door({"put": DENIED})
    session = await guarded(door, World(answer))
    result = await session.step(says("get", "put"), "e/0/0")
    assert [(m.role, m.content) for m in result.messages] == [
        (Role.TOOL, "get says {}"),
        (Role.TOOL, "blocked: no"),
        (Role.USER, "a page"),
    ]
    assert door.settled == [("e/0/0", ["get says {}\na page"])]


async def test_two_tools_of_one_name_are_refused():
    door = Door({}, (ToolSpec("get"),))
    with pytest.raises(EnvironmentFault, match="get is mounted"):
        await guarded(door, policy=Policy(mounts=(Mount("search"),)))


async def test_a_gateway_that_answers_for_another_number_of_calls_is_away():
    class Short(Door):
        async def decide(self, calls, key):
            return [CallVerdict()]

    with pytest.raises(GatewayAway):
        await (await guarded(Short())).step(says("get", "get"), "e/0/0")
