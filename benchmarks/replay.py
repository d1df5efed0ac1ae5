"""What a replay costs: CPU per episode of replaying a stored run, against stepping the bare world in the same run.

A run of the lookup world, solved and unsolved episodes of 3 to 9 turns by a scripted policy, is written to a real
episode store as a worker does. Then, in turns:

- `headrace replay`: the product's `replay_all` over the whole store: reading Parquet, decoding, fresh sessions, keys,
  deadlines, every raw and canonical hash compared, reports counted.
- `bare world`: the floor. The same messages, taken from memory, given to fresh sessions of the same world; no store, no
  hashing of what comes back, no comparison, no deadlines.

`share_equal` must be 1.0: the world is deterministic. Wall time per episode is given beside CPU time.
"""

import argparse
import asyncio
import gc
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence

import numpy as np
from common import cpu_s, result, row_of, table

from headrace import __version__
from headrace.actors.environments.lookup import LookupEnvironment
from headrace.actors.recorder import as_step_message, joined_text
from headrace.deploy.replaying import Tally, replay_all
from headrace.platform.config.environments import EnvironmentConfig
from headrace.platform.hashing import hash_text
from headrace.platform.records import (
    ActionKind,
    AttemptId,
    Episode,
    Message,
    Role,
    Status,
    StopReason,
    Task,
    ToolCall,
    Turn,
    VersionRef,
    VersionSpan,
    View,
    i32,
)
from headrace.platform.records.codec import episode_codec
from headrace.platform.records.turn import ToolCallRecord
from headrace.platform.store.episodes import EpisodeStore

TARGET = 8.0
UNIT = "us CPU per episode"
VERSION = VersionRef("scripted", 0)
TOKENS = 16
PER_FILE = 32
Script = list[tuple[Task, int, list[Message]]]


async def play(number: int, dice: random.Random) -> Episode:
    """One episode as the loop would record it: a chain of reads, then an answer, right in three of four."""
    chain = [f"k{key:02d}" for key in dice.sample(range(32), dice.randint(2, 8))]
    task = Task(f"lookup-{number}", "lookup", {"chain": chain, "answer": "v42"})
    world = LookupEnvironment()
    observation = await world.reset(task, number)
    turns = [_given(Role.USER, observation.messages, observation.state_hash)]
    views = []
    calls = [Message(Role.ASSISTANT, tool_calls=(ToolCall("get", {"key": key}, f"call-{key}"),)) for key in chain]
    for step, said in enumerate([*calls, Message(Role.ASSISTANT, dice.choice(["v42", "v42", "v42", "v07"]))]):
        answer = await world.step(said, f"{number}/{step}")
        views.append(View(len(turns), ((0, len(turns)),)))
        turns.append(_sampled(said, answer.state_hash))
        if answer.messages:
            turns.append(_given(Role.TOOL, answer.messages, answer.state_hash))
    return Episode(
        attempt_id=AttemptId("bench", number, 0),
        task=task,
        environment=world.name,
        environment_version=world.version,
        seed=number,
        version=VERSION,
        turns=tuple(turns),
        views=tuple(views),
        status=Status.OK,
        stop_reason=StopReason.TERMINATED,
        terminated=True,
        truncated=False,
    )


def _given(role: Role, messages: Sequence[Message], state_hash: object) -> Turn:
    text = joined_text(messages)
    return Turn(
        role=role,
        token_ids=i32(range(TOKENS)),
        action_mask=np.zeros(TOKENS, np.uint8),
        behaviour_logprobs=np.zeros(TOKENS, np.float32),
        content=text,
        observation_hash=hash_text(text),
        state_hash=state_hash,  # type: ignore[arg-type]
    )


def _sampled(said: Message, state_hash: object) -> Turn:
    return Turn(
        role=Role.ASSISTANT,
        token_ids=i32(range(TOKENS)),
        action_mask=np.ones(TOKENS, np.uint8),
        behaviour_logprobs=np.full(TOKENS, -0.5, np.float32),
        content=said.content,
        version_spans=(VersionSpan(VERSION, 0, TOKENS),),
        action_kind=ActionKind.TOOL if said.tool_calls else ActionKind.TEXT,
        tool_calls=tuple(
            ToolCallRecord(index=index, call_id=call.call_id, name=call.name, arguments=call.arguments)
            for index, call in enumerate(said.tool_calls)
        ),
        state_hash=state_hash,  # type: ignore[arg-type]
    )


async def stored_run(root: str, count: int) -> Script:
    """Write `count` episodes to a store; what the floor needs of them."""
    store, dice, script = EpisodeStore(root), random.Random(0), []
    for start in range(0, count, PER_FILE):
        episodes = [await play(number, dice) for number in range(start, min(count, start + PER_FILE))]
        store.write([(episode, episode_codec.encode(episode)) for episode in episodes], "bench")
        for episode in episodes:
            said = [as_step_message(turn) for turn in episode.turns if turn.role is Role.ASSISTANT]
            script.append((episode.task, episode.seed, said))
    return script


async def bare(script: Script) -> None:
    """The floor."""
    for number, (task, seed, messages) in enumerate(script):
        world = LookupEnvironment()
        await world.reset(task, seed)
        for step, message in enumerate(messages):
            await world.step(message, f"{number}/{step}")
        await world.close()


async def replay(root: str) -> Tally:
    """The product over a whole store."""
    return await replay_all(EpisodeStore(root).iterate(), [EnvironmentConfig(name="lookup")], 0)


def main() -> None:
    """Measure, print a table, and with --json one object on the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--episodes", type=int, default=3000)
    arguments = parser.parse_args()
    count, ours, floor, rates, equal = arguments.episodes, [], [], [], []
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as root:
        script = asyncio.run(stored_run(root, count))
        for repeat in range(arguments.repeats + 1):
            gc.collect()
            before, wall = cpu_s(), time.monotonic()
            tally = asyncio.run(replay(root))
            replayed, seconds = cpu_s() - before, time.monotonic() - wall
            gc.collect()
            before = cpu_s()
            asyncio.run(bare(script))
            stepped = cpu_s() - before
            equal.append((tally.episodes - tally.diverged - tally.not_compared) / count)
            if repeat:  # the first one warms up
                ours.append(replayed / count * 1e6)
                floor.append(stepped / count * 1e6)
                rates.append(count / seconds)
    share_equal = min(equal)
    ratio = round(float(np.median([this / that for this, that in zip(ours, floor, strict=True)])), 3)
    rows = [
        row_of("bare world", platform.python_version(), UNIT, floor),
        row_of("headrace replay", __version__, UNIT, ours, share_equal=share_equal),
        row_of("headrace replay", __version__, "episodes per second of wall time", rates),
    ]
    holds = share_equal == 1.0 and ratio <= TARGET
    turns = statistics.mean(len(messages) for _, _, messages in script)
    sys.stdout.write(table(rows) + "\n")
    sys.stdout.write(f"ratio {ratio} (target {TARGET}), share equal {share_equal}, {turns:.1f} steps per episode\n")
    if arguments.json:
        facts = {"share_equal": share_equal, "episodes": count, "steps_per_episode": round(turns, 2)}
        sys.stdout.write(result("replay", ratio, TARGET, holds, rows, **facts) + "\n")


if __name__ == "__main__":
    main()
