"""What every `Environment` must do. Run each function of `ENVIRONMENT_SUITE` with a context of your own.

The context brings a short script of assistant messages that plays an episode from `reset` to its end. What is compared
is what a replay compares: everything but raw hashes, measured seconds, and what the normaliser of hashing.py takes out.
Other checks of the suite are in environment_ends.py and environment_replay.py.
"""

from collections.abc import Awaitable, Callable
from functools import partial

import msgspec

from headrace.platform.records.message import Message, ToolCall
from headrace.platform.records.status import Role, Status
from headrace.platform.testing.conformance.environment_context import EnvironmentContext, as_text, check_same
from headrace.platform.testing.conformance.environment_ends import (
    calls_end_in_time,
    terminated_is_not_truncated,
    the_script_ends_once,
)
from headrace.platform.testing.conformance.environment_replay import (
    a_replay_is_equal,
    clones_are_independent,
    everything_survives_the_wire,
    snapshots_go_back,
    snapshots_keep_the_random_state,
)
from headrace.platform.testing.conformance.support import refusal, settled, survives_json

__all__ = ["ENVIRONMENT_SUITE", "EnvironmentContext"]


async def same_seed_same_world(context: EnvironmentContext) -> None:
    """Replay depends on it: task, seed and actions decide everything."""
    (one, first), (two, second) = await context.begin(), await context.begin()
    assert as_text(first) == as_text(second), "two resets with the same task and seed differ"
    check_same(await context.play(one), await context.play(two), "the same actions under the same seed give")
    check_same(
        [as_text(await settled(one.reset(context.task, context.seed)))], [as_text(first)], "a second reset gives"
    )
    await settled(one.close())
    await settled(two.close())


async def a_key_is_used_once(context: EnvironmentContext) -> None:
    """A retry under the same key gives the recorded result and does nothing (case X3)."""
    session, _ = await context.begin()
    reference, _ = await context.begin()
    played = []
    for number, message in enumerate(context.script):
        result = as_text(await settled(session.step(message, f"a/{number}")))
        again = as_text(await settled(session.step(message, f"a/{number}")))
        assert again == result, f"step {number} under the same key gives another result: a lost reply would act twice"
        played.append(result)
    check_same(played, await context.play(reference), "with every step retried the episode is")
    await settled(session.close())
    await settled(reference.close())


async def a_key_belongs_to_one_message(context: EnvironmentContext) -> None:
    """The same key with another body is a conflict (P25)."""
    session, _ = await context.begin()
    await settled(session.step(context.script[0], "a/0"))
    other = msgspec.structs.replace(context.script[0], content=context.script[0].content + " and more")
    error = await refusal(lambda: session.step(other, "a/0"))
    assert error is not None, "the same key with another message was accepted; it must raise"
    await settled(session.close())


async def a_new_key_is_a_new_effect(context: EnvironmentContext) -> None:
    """Two equal calls are two calls (case X3)."""
    if context.effect is None:
        return  # a world that can only be read has no effect that could be counted
    effect = context.effect
    session, observation = await context.begin()
    hashes = [observation.state_hash]
    for key in ("a/0", "a/1"):
        hashes.append((await settled(session.step(effect, key))).state_hash)
    assert len(set(hashes)) == 3, f"the same message under two keys must act twice, but the states are {hashes}"
    await settled(session.close())


async def sessions_share_nothing(context: EnvironmentContext) -> None:
    """What happens in one session is not seen in another (case X13)."""
    alone, _ = await context.begin()
    expected = await context.play(alone)
    one, _ = await context.begin()
    other, _ = await context.begin(context.seed + 1)
    mixed = []
    for number in range(len(context.script)):
        mixed += await context.play(one, number, number + 1)
        await refusal(partial(other.step, context.script[number], f"a/{number}"))
    check_same(mixed, expected, "beside another session the episode is")
    late, _ = await context.begin()
    await settled(one.close())
    check_same(await context.play(late), expected, "after another session was closed the episode is")
    for session in (alone, other, late):
        await settled(session.close())


async def mistakes_of_the_model_are_answered(context: EnvironmentContext) -> None:
    """A wrong call comes back as an observation, not as an error of the environment."""
    session, _ = await context.begin()
    wrong = Message(Role.ASSISTANT, tool_calls=(ToolCall("no_such_tool", {"x": 1}, "call-0"),))
    result = await settled(session.step(wrong, "a/0"))
    assert result.status is Status.MODEL_INVALID_ACTION, f"a call of an unknown tool has status {result.status}"
    assert result.messages, "a call of an unknown tool got no answer that could help the model"
    assert not any(reward.value for reward in result.rewards if reward.valid), "a call of an unknown tool was rewarded"
    await settled(session.close())


async def tools_are_stable(context: EnvironmentContext) -> None:
    """The same tools all session long, with names and schemas that can be shown to a model."""
    session = context.make()
    before = list(session.tools())
    await settled(session.reset(context.task, context.seed))
    await context.play(session)
    assert list(session.tools()) == before, "the tools changed during a session"
    names = [tool.name for tool in before]
    assert len(set(names)) == len(names), f"two tools have one name: {names}"
    assert all(survives_json(tool.parameters) for tool in before), "a tool's parameters are not JSON"
    assert session.name and session.version, "an environment has a name and a version"
    await settled(session.close())


async def close_is_safe_twice(context: EnvironmentContext) -> None:
    """Before reset, in the middle and twice: closing never fails, and nothing happens afterwards."""
    fresh = context.make()
    session, _ = await context.begin()
    for one in (fresh, session):
        for time in ("first", "second"):
            error = await refusal(one.close)
            assert error is None, f"the {time} close raised {error!r}"
    error = await refusal(lambda: session.step(context.script[0], "late"))
    assert error is not None, "a step after close was accepted"


async def step_before_reset_raises(context: EnvironmentContext) -> None:
    """There is no state to act on yet."""
    session = context.make()
    error = await refusal(lambda: session.step(context.script[0], "a/0"))
    assert error is not None, "a step before reset was accepted"
    await settled(session.close())


ENVIRONMENT_SUITE: dict[str, Callable[[EnvironmentContext], Awaitable[None]]] = {
    check.__name__: check
    for check in (
        same_seed_same_world,
        the_script_ends_once,
        terminated_is_not_truncated,
        a_key_is_used_once,
        a_key_belongs_to_one_message,
        a_new_key_is_a_new_effect,
        sessions_share_nothing,
        a_replay_is_equal,
        snapshots_go_back,
        snapshots_keep_the_random_state,
        clones_are_independent,
        mistakes_of_the_model_are_answered,
        everything_survives_the_wire,
        tools_are_stable,
        calls_end_in_time,
        close_is_safe_twice,
        step_before_reset_raises,
    )
}
