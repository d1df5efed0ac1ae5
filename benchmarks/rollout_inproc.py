"""What the episode loop costs: CPU per turn of the whole loop, against a bare asyncio loop in the same run.

An episode has 8 turns of 16 sampled tokens: seven tool calls and an answer. The engine answers at once, from memory,
after one turn of the event loop; so everything measured is the loop itself.

- `headrace`: the product's `play_episode` with the lookup world, its renderer and tool format, the fake engine that is
  product code; records, masks, raw and canonical hashes, deadlines, idempotency keys and rewards included.
- `bare asyncio loop`: the floor. The same logical work on plain lists: ask, append a message, parse the tool call's
  JSON, call a function, append ids, logprobs and mask. No records, hashes, deadlines, tokenizer.

Systems take turns, repetition by repetition. Memory is the growth of the resident set while N episodes stand at their
last turn.
"""

import argparse
import asyncio
import gc
import itertools
import json
import os
import platform
import random
import resource
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import cpu_s, result, row_of, table

from headrace import __version__
from headrace.actors.environments.lookup import LookupEnvironment, tokenizer_files
from headrace.actors.episode import play_episode
from headrace.actors.plan import EpisodePlan
from headrace.actors.rendering import load_renderer
from headrace.actors.tuning import tune_collector
from headrace.platform.contracts import Renderer
from headrace.platform.records import (
    AttemptId,
    Budgets,
    FinishReason,
    Generation,
    GenerationRequest,
    Message,
    Role,
    SamplingParams,
    Task,
    ToolCall,
    VersionRef,
    VersionSpan,
    f32,
    i32,
)
from headrace.platform.testing.fakes.engine import ScriptedEngine

TURNS = 8
TOKENS = 16
CONCURRENCY = (1, 64, 1024, 4096)
TARGET, GROWTH_TARGET, MEMORY_TARGET_MB = 8.0, 1.3, 25.0
UNIT = "us CPU per turn"
VERSION = VersionRef("scripted", 0)
Play = Callable[[int], Awaitable[object]]


# --- the product ------------------------------------------------------------------------------------------------------


def model_renderer() -> Renderer:
    """The lookup recipe's renderer, from its own tokenizer files."""
    with tempfile.TemporaryDirectory() as folder:
        for name, data in tokenizer_files().items():
            (Path(folder) / name).write_bytes(data)
        return load_renderer(folder)


class Product:
    """headrace's episode loop over a scripted engine."""

    def __init__(self) -> None:
        self._renderer = model_renderer()
        self._scripts: dict[str, Iterator[Generation]] = {}
        self._engine = ScriptedEngine(lambda request: next(self._scripts[request.session]))
        self._calls = {f"k{i:02d}": self._say(Message(Role.ASSISTANT, tool_calls=(_get(i),))) for i in range(32)}
        self._answers = {f"v{i:02d}": self._say(Message(Role.ASSISTANT, f"v{i:02d}")) for i in range(100)}
        self._rng = random.Random(0)
        self._plans: list[EpisodePlan] = []
        self._spare = Budgets(TURNS, 4096, 600.0)

    def prepare(self, episodes: int) -> None:
        """Plans and scripts: made outside of the clock."""
        self._plans, self._scripts = [], {}
        for number in range(episodes):
            chain = self._rng.sample(sorted(self._calls), TURNS - 1)
            answer = self._rng.choice(sorted(self._answers))
            attempt_id = AttemptId("bench", number, 0)
            self._scripts[str(attempt_id)] = iter([*(self._calls[key] for key in chain), self._answers[answer]])
            self._plans.append(
                EpisodePlan(
                    attempt_id=attempt_id,
                    task=Task(f"lookup-{number}", "lookup", {"chain": chain, "answer": answer}),
                    seed=number,
                    version=VERSION,
                    sampling=SamplingParams(max_new_tokens=32, stop_token_ids=self._renderer.stop_token_ids),
                    budgets=self._spare,
                )
            )

    async def play(self, number: int) -> object:
        """One episode; a wrong one is an error of the benchmark."""
        played = await play_episode(self._plans[number], LookupEnvironment(), self._renderer, self._engine)
        if played.score != 1.0 or len(played.episode.views) != TURNS:
            raise RuntimeError(f"the benchmark's episode went wrong: {played.episode.status} {played.episode.fault}")
        return played

    def hold(self, standing: asyncio.Event, all_there: asyncio.Event, episodes: int) -> None:
        """From now on the last turn waits for `standing`; `all_there` is set when all `episodes` do."""
        engine, arrivals = self._engine, itertools.count(1)

        class Holding:
            async def generate(self, request: GenerationRequest) -> Generation:
                if request.key.endswith(f"/{TURNS - 1}"):
                    if next(arrivals) == episodes:
                        all_there.set()
                    await standing.wait()
                return await engine.generate(request)

            release, versions = engine.release, engine.versions

        self._engine = Holding()  # type: ignore[assignment]

    def _say(self, message: Message) -> Generation:
        """A sampled turn of `TOKENS` tokens that reads as `message`: a call after some words, or the bare answer."""
        opening = Message(Role.USER)
        head, tail = self._renderer.render([opening], ()), self._renderer.bridge([], ended=True) or []
        whole = self._renderer.render([opening, message], ())
        said = whole[len(head) : len(whole) - len(tail)]
        words = self._renderer.render([Message(Role.USER, "k00" * (TOKENS - len(said)))], ())[1:-2]
        ids = [*words, *said] if message.tool_calls else said
        return Generation(
            i32(ids), f32([-0.5] * len(ids)), FinishReason.STOP, (VersionSpan(VERSION, 0, len(ids)),), "scripted"
        )


def _get(key: int) -> ToolCall:
    return ToolCall("get", {"key": f"k{key:02d}"})


# --- the floor --------------------------------------------------------------------------------------------------------

IDS, LOGPROBS = list(range(TOKENS)), [-0.5] * TOKENS
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call_1", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}],
}
FINAL: dict[str, Any] = {"role": "assistant", "content": "ok"}


async def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The instant model of the floor."""
    await asyncio.sleep(0)
    return CALL if len(messages) < 2 * (TURNS - 1) + 1 else FINAL


def add(a: int, b: int) -> int:
    """The tool of the floor."""
    return a + b


async def floor_episode(number: int) -> object:
    """What nobody can do without."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"task {number}"}]
    tokens: list[int] = []
    logprobs: list[float] = []
    mask: list[int] = []
    while True:
        message = await ask(messages)
        messages.append(message)
        tokens += IDS
        logprobs += LOGPROBS
        mask += [1] * TOKENS
        calls = message.get("tool_calls")
        if not calls:
            return len(tokens), 1.0
        for call in calls:
            answer = add(**json.loads(call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(answer)})
            tokens.append(7)
            logprobs.append(0.0)
            mask.append(0)


# --- measuring --------------------------------------------------------------------------------------------------------


async def run(play: Play, concurrency: int, episodes: int) -> None:
    """`concurrency` workers share `episodes` episodes."""
    numbers = iter(range(episodes))

    async def worker() -> None:
        for number in numbers:
            await play(number)

    await asyncio.gather(*(worker() for _ in range(min(concurrency, episodes))))


def cost(play: Play, concurrency: int, episodes: int) -> float:
    """Microseconds of CPU per turn."""
    gc.collect()
    before = cpu_s()
    asyncio.run(run(play, concurrency, episodes))
    return (cpu_s() - before) / episodes / TURNS * 1e6


def resident_mb() -> float:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


def memory_per_thousand(episodes: int) -> float:
    """Megabytes per thousand live episodes, in a child process whose memory holds nothing else."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, str(_grown_mb(episodes) / episodes * 1000).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        grown = float(answer.read())
    os.waitpid(child, 0)
    return grown


def _grown_mb(episodes: int) -> float:
    async def measure() -> float:
        product, standing, all_there = Product(), asyncio.Event(), asyncio.Event()
        product.prepare(episodes)
        product.hold(standing, all_there, episodes)
        before = resident_mb()
        playing = [asyncio.create_task(product.play(number)) for number in range(episodes)]  # type: ignore[arg-type]
        await all_there.wait()
        grown = resident_mb() - before
        standing.set()
        await asyncio.gather(*playing)
        return grown

    return asyncio.run(measure())


def main() -> None:
    """Measure, print a table, and with --json one object on the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--episodes", type=int, default=1024, help="per repetition, at least the concurrency")
    arguments = parser.parse_args()

    grown_mb = memory_per_thousand(2048)
    tune_collector()  # as every rollout worker does
    product = Product()
    systems: dict[str, Play] = {"bare asyncio loop": floor_episode, "headrace": product.play}
    samples: dict[tuple[str, int], list[float]] = {key: [] for key in itertools.product(systems, CONCURRENCY)}
    for repeat, concurrency in itertools.product(range(arguments.repeats + 1), CONCURRENCY):
        episodes = max(concurrency, arguments.episodes if concurrency > 1 else arguments.episodes // 4)
        for name, play in systems.items():
            product.prepare(episodes)
            figure = cost(play, concurrency, episodes)
            if repeat:  # the first one warms up
                samples[name, concurrency].append(figure)

    rows = [
        row_of(name, __version__ if name == "headrace" else platform.python_version(), UNIT, values, concurrency=c)
        for (name, c), values in samples.items()
    ]
    ratios = {c: _ratio(samples["headrace", c], samples["bare asyncio loop", c]) for c in CONCURRENCY}
    growth = _ratio(samples["headrace", 4096], samples["headrace", 64])
    holds = max(ratios.values()) <= TARGET and growth <= GROWTH_TARGET and grown_mb <= MEMORY_TARGET_MB
    sys.stdout.write(table(rows) + "\n")
    sys.stdout.write(f"ratios {ratios}  cost at 4096 over cost at 64: {growth}  {grown_mb:.1f} MB per 1000 live\n")
    if arguments.json:
        sys.stdout.write(
            result(
                "rollout_inproc",
                ratios[64],
                TARGET,
                holds,
                rows,
                ratios={str(c): r for c, r in ratios.items()},
                growth=growth,
                growth_target=GROWTH_TARGET,
                mb_per_thousand_live=round(grown_mb, 2),
                mb_target=MEMORY_TARGET_MB,
            )
            + "\n"
        )


def _ratio(these: list[float], those: list[float]) -> float:
    """The median of the pairwise ratios: neighbours in time share the machine's mood."""
    return round(float(np.median([this / that for this, that in zip(these, those, strict=True)])), 3)


if __name__ == "__main__":
    main()
