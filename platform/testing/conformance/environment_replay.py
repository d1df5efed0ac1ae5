"""That an episode of an environment can be played again: from its record, from a snapshot, in a clone, after a hop."""

from collections.abc import Sequence

import msgspec

from headrace.platform.hashing import canonical_text, hash_text
from headrace.platform.records.message import Message, Observation, StepResult
from headrace.platform.testing.conformance.environment_context import EnvironmentContext, as_text, check_same
from headrace.platform.testing.conformance.support import refusal, settled, survives_json


async def a_replay_is_equal(context: EnvironmentContext) -> None:
    """What the record of an episode says is found again, step by step, in a fresh session that is begun after the
    first one was closed, and under other keys (P26)."""
    recorded = await _recorded(context, "episode/0")
    replayed = await _recorded(context, "episode/1")
    for number, (before, now) in enumerate(zip(recorded, replayed, strict=True)):
        where = f"step {number - 1}" if number else "reset"
        for part, value in before.items():
            assert now[part] == value, f"a replay differs first at {where}, in its {part}: {now[part]} was {value}"


async def snapshots_go_back(context: EnvironmentContext) -> None:
    """Restore brings the state back, as a new branch whose key table is empty (P26)."""
    middle = len(context.script) // 2
    session, _ = await context.begin()
    await context.play(session, 0, middle)
    snapshot_id = await settled(session.snapshot())
    expected = await context.play(session, middle)
    for attempt in ("first", "second"):
        await settled(session.restore(snapshot_id))
        check_same(await context.play(session, middle), expected, f"after the {attempt} restore the rest is")
    await settled(session.restore(snapshot_id))
    other = msgspec.structs.replace(context.script[middle], content=context.script[middle].content + " again")
    error = await refusal(lambda: session.step(other, f"a/{middle}"))
    assert error is None, f"a key of the branch before was still known after restore: {error!r}"
    assert await refusal(lambda: session.restore("no-such-snapshot")) is not None, "an unknown snapshot was restored"
    await settled(session.close())


async def snapshots_keep_the_random_state(context: EnvironmentContext) -> None:
    """Whatever is drawn after a snapshot is drawn again after its restore, and in a clone, at every step of the way."""
    session, _ = await context.begin()
    for number in range(len(context.script)):
        snapshot_id, twin = await settled(session.snapshot()), await settled(session.clone())
        expected = await context.play(session, number, number + 1)
        await settled(session.restore(snapshot_id))
        again = await context.play(session, number, number + 1, "restored")
        check_same(again, expected, f"after a restore to step {number} what comes next is")
        check_same(
            await context.play(twin, number, number + 1, "clone"),
            expected,
            f"in a clone made at step {number} what comes next is",
        )
        await settled(twin.close())
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
    check_same(rest, expected, "after its original was played and closed, the clone's rest is")
    other = msgspec.structs.replace(context.script[middle], content=context.script[middle].content + " again")
    error = await refusal(lambda: third.step(other, "a/0"))
    assert error is None, f"a clone knew a key of its original, or was ended by it: {error!r}"
    await settled(twin.close())
    await settled(third.close())


async def everything_survives_the_wire(context: EnvironmentContext) -> None:
    """Observations, results and their metadata are the same after every hop: in a file of JSON, as msgpack between
    processes, and as the JSON of an environment host (case X16)."""
    session, observation = await context.begin()
    records: list[Observation | StepResult] = [observation]
    for number, message in enumerate(context.script):
        records.append(await settled(session.step(message, f"a/{number}")))
    for record in records:
        assert survives_json(record.metadata), f"metadata is not JSON-safe: {record.metadata!r}"
        kind = type(record)
        for name, again in (
            ("msgpack", msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=kind)),
            ("JSON", msgspec.json.decode(msgspec.json.encode(record), type=kind)),
        ):
            assert again == record, f"{record!r} is {again!r} after a hop as {name}"
    await settled(session.close())


async def _recorded(context: EnvironmentContext, branch: str) -> list[dict[str, str]]:
    """A whole episode as its record has it: hashes and results, the reset first."""
    session, observation = await context.begin()
    rows = [_row(observation.messages, observation)]
    for number, message in enumerate(context.script):
        answer = await settled(session.step(message, f"{branch}/{number}"))
        rows.append(_row(answer.messages, answer))
    await settled(session.close())
    return rows


def _row(messages: Sequence[Message], record: Observation | StepResult) -> dict[str, str]:
    said = "\n".join(message.content for message in messages)
    return {
        "state hash": record.state_hash.canonical or record.state_hash.raw,
        "observation": f"{canonical_text(said)!r:.120} ({hash_text(said).canonical[:12]})",
        "result": as_text(record),
    }
