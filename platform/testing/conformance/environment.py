"""What every `Environment` must do. Run each function of `ENVIRONMENT_SUITE` with a context of your own.

The context brings a short script of assistant messages that plays an episode from `reset` to its end.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from headrace.platform.contracts import Environment
from headrace.platform.records.message import Message, Observation, StepResult, Task, ToolCall
from headrace.platform.records.status import Role, Status
from headrace.platform.testing.conformance.support import refusal, settled, survives_json


@dataclass(kw_only=True, slots=True, frozen=True)
class EnvironmentContext:
    """What the suite runs against.

    `make` returns a fresh session. `script` ends the episode of `task` and `seed` with its last message and not
    before; three messages or more check the most. `effect` is a message that changes the state hash each time it is
    applied, to prove that a new key is a new effect; None for a world that can only be read.
    """

    make: Callable[[], Environment]
    task: Task
    script: Sequence[Message]
    seed: int = 0
    effect: Message | None = None

    async def begin(self, seed: int | None = None) -> tuple[Environment, Observation]:
        """A session that has been reset."""
        session = self.make()
        return session, await settled(session.reset(self.task, self.seed if seed is None else seed))

    async def play(self, session: Environment, start: int = 0, stop: int | None = None, branch: str = "a") -> list[str]:
        """Play part of the script; one comparable text a step."""
        steps = list(enumerate(self.script))[start:stop]
        return [_text(await settled(session.step(message, f"{branch}/{n}"))) for n, message in steps]


async def same_seed_same_world(context: EnvironmentContext) -> None:
    """Replay depends on it: task, seed and actions decide everything."""
    (one, first), (two, second) = await context.begin(), await context.begin()
    assert _text(first) == _text(second), "two resets with the same task and seed differ"
    _same(await context.play(one), await context.play(two), "the same actions under the same seed give")
    _same([_text(await settled(one.reset(context.task, context.seed)))], [_text(first)], "a second reset gives")
    await settled(one.close())
    await settled(two.close())


async def the_script_ends_once(context: EnvironmentContext) -> None:
    """An episode ends by itself or by a limit, never both, and nothing can be done afterwards."""
    session, _ = await context.begin()
    for number, message in enumerate(context.script):
        result = await settled(session.step(message, f"a/{number}"))
        assert not (result.terminated and result.truncated), f"step {number} is terminated and truncated at once"
        is_last = number == len(context.script) - 1
        assert (result.terminated or result.truncated) == is_last, (
            f"step {number} of {len(context.script)} has terminated={result.terminated}, truncated={result.truncated};"
            " the context's script must end the episode with its last message"
        )
    error = await refusal(lambda: session.step(context.script[0], "after the end"))
    assert error is not None, "a step after the end was accepted; it must raise, or an episode silently goes on"
    await settled(session.snapshot())
    await settled(session.close())


async def a_key_is_used_once(context: EnvironmentContext) -> None:
    """A retry under the same key gives the recorded result and does nothing (case X3)."""
    session, _ = await context.begin()
    reference, _ = await context.begin()
    played = []
    for number, message in enumerate(context.script):
        result = _text(await settled(session.step(message, f"a/{number}")))
        again = _text(await settled(session.step(message, f"a/{number}")))
        assert again == result, f"step {number} under the same key gives another result: a lost reply would act twice"
        played.append(result)
    _same(played, await context.play(reference), "with every step retried the episode is")
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
    _same(mixed, expected, "beside another session the episode is")
    late, _ = await context.begin()
    await settled(one.close())
    _same(await context.play(late), expected, "after another session was closed the episode is")
    for session in (alone, other, late):
        await settled(session.close())


async def snapshots_go_back(context: EnvironmentContext) -> None:
    """Restore brings the state back, as a new branch whose key table is empty (P26)."""
    middle = len(context.script) // 2
    session, _ = await context.begin()
    await context.play(session, 0, middle)
    snapshot_id = await settled(session.snapshot())
    expected = await context.play(session, middle)
    for attempt in ("first", "second"):
        await settled(session.restore(snapshot_id))
        _same(await context.play(session, middle), expected, f"after the {attempt} restore the rest is")
    await settled(session.restore(snapshot_id))
    other = msgspec.structs.replace(context.script[middle], content=context.script[middle].content + " again")
    error = await refusal(lambda: session.step(other, f"a/{middle}"))
    assert error is None, f"a key of the branch before was still known after restore: {error!r}"
    assert await refusal(lambda: session.restore("no-such-snapshot")) is not None, "an unknown snapshot was restored"
    await settled(session.close())


async def clones_are_independent(context: EnvironmentContext) -> None:
    """A clone goes on from the present state, as a new branch with an empty key table, and neither sees the other."""
    middle = len(context.script) // 2
    session, _ = await context.begin()
    await context.play(session, 0, middle)
    twin, third = await settled(session.clone()), await settled(session.clone())
    expected = await context.play(session, middle)
    await settled(session.close())
    rest = await context.play(twin, middle, branch="clone")  # other keys, so that no table can answer for the state
    _same(rest, expected, "after its original was played and closed, the clone's rest is")
    other = msgspec.structs.replace(context.script[middle], content=context.script[middle].content + " again")
    error = await refusal(lambda: third.step(other, "a/0"))
    assert error is None, f"a clone knew a key of its original, or was ended by it: {error!r}"
    await settled(twin.close())
    await settled(third.close())


async def mistakes_of_the_model_are_answered(context: EnvironmentContext) -> None:
    """A wrong call comes back as an observation, not as an error of the environment."""
    session, _ = await context.begin()
    wrong = Message(Role.ASSISTANT, tool_calls=(ToolCall("no_such_tool", {"x": 1}, "call-0"),))
    result = await settled(session.step(wrong, "a/0"))
    assert result.status is Status.MODEL_INVALID_ACTION, f"a call of an unknown tool has status {result.status}"
    assert result.messages, "a call of an unknown tool got no answer that could help the model"
    assert not any(reward.value for reward in result.rewards if reward.valid), "a call of an unknown tool was rewarded"
    await settled(session.close())


async def everything_survives_the_wire(context: EnvironmentContext) -> None:
    """Observations, results and their metadata are the same after a hop (case X16)."""
    session, observation = await context.begin()
    records: list[Observation | StepResult] = [observation]
    for number, message in enumerate(context.script):
        records.append(await settled(session.step(message, f"a/{number}")))
    for record in records:
        assert survives_json(record.metadata), f"metadata is not JSON-safe: {record.metadata!r}"
        again = msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=type(record))
        assert again == record, f"{record!r} is {again!r} after a hop"
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


def _text(record: Observation | StepResult) -> str:
    return msgspec.json.encode(record).decode()


def _same(found: Sequence[str], expected: Sequence[str], what: str) -> None:
    for number, (left, right) in enumerate(zip(found, expected, strict=True)):
        assert left == right, f"{what} different at its step {number}: {left} instead of {right}"


ENVIRONMENT_SUITE: dict[str, Callable[[EnvironmentContext], Awaitable[None]]] = {
    check.__name__: check
    for check in (
        same_seed_same_world,
        the_script_ends_once,
        a_key_is_used_once,
        a_key_belongs_to_one_message,
        a_new_key_is_a_new_effect,
        sessions_share_nothing,
        snapshots_go_back,
        clones_are_independent,
        mistakes_of_the_model_are_answered,
        everything_survives_the_wire,
        tools_are_stable,
        close_is_safe_twice,
        step_before_reset_raises,
    )
}
