"""Records the golden episodes: `python tests/golden/record.py` writes tests/golden/episodes/NAME.msgpack.

Each is played by a scripted policy in an environment of this build, in every way in which an episode can end. Times and
line numbers are left out, so recording again changes nothing unless an environment, the record or the loop has changed:
that is a decision, to be seen in review, and never a repair of a failing test.
"""

import asyncio
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from headrace.actors.environments.adapter import AsyncEnvironment
from headrace.actors.environments.base import ReplayedEnvironment
from headrace.actors.environments.faulty import with_faults
from headrace.actors.environments.guess import GuessEnvironment
from headrace.actors.environments.lookup import LookupEnvironment, SandboxedLookup
from headrace.actors.environments.lookup.vocabulary import tokenizer_files
from headrace.actors.episode import play_episode
from headrace.actors.plan import EpisodePlan
from headrace.actors.rendering import load_renderer
from headrace.platform.config.faults import FaultConfig
from headrace.platform.contracts import Renderer
from headrace.platform.hashing import hash_value
from headrace.platform.records import (
    AttemptId,
    Budgets,
    Message,
    Observation,
    Role,
    SamplingParams,
    StepResult,
    Task,
    ToolCall,
    ToolSpec,
    VersionRef,
)
from headrace.platform.records.codec import episode_codec
from headrace.platform.records.episode import Episode, Stamps
from headrace.platform.testing.fakes.engine import ScriptedEngine
from headrace.platform.testing.fakes.environment import ScriptedEnvironment
from headrace.platform.testing.fakes.renderer import END, CharRenderer
from headrace.platform.testing.fakes.sandbox import MemorySandboxProvider

EPISODES = Path(__file__).parent / "episodes"
CHAIN = Task("lookup-golden", "lookup", {"chain": ["k03", "k17", "k29"], "answer": "v42"})
NUMBER = Task("guess-golden", "guess", {"number": 40})
SOLUTION = ("<call>get k03</call>", "<call>get k17</call>", "<call>get k29</call>", "v42")


class PriceDesk(ReplayedEnvironment):
    """Asks a service outside for the price of a thing; the service is a stand-in whose answers never come twice."""

    name = "price-desk"
    version = "1"

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def tools(self) -> Sequence[ToolSpec]:
        """The tool `ask`."""
        return (ToolSpec("ask", "The price of a thing.", {"type": "object", "properties": {"of": {"type": "string"}}}),)

    async def _reset(self, task: Task, seed: int) -> Observation:
        self._told: list[Any] = [await self.outside({"service": "desk", "is": "open"}, self._service)]
        return Observation((Message(Role.USER, f"What is a {task.data['thing']}?"),), hash_value(self._told))

    async def _step(self, message: Message) -> StepResult:
        if not message.tool_calls:
            return StepResult(terminated=True, state_hash=hash_value(self._told))
        answers = []
        for call in message.tool_calls:
            price = await self.outside({"service": "price", "of": call.arguments.get("of")}, self._service)
            self._told.append(price)
            answers.append(Message(Role.TOOL, f"It is {price['price']}.", tool_call_id=call.call_id))
        return StepResult(tuple(answers), state_hash=hash_value(self._told))

    def _service(self) -> dict[str, Any]:
        self.asked += 1
        return {"price": 100 + self.asked, "by": ["the desk"]}


class StalledLookup(LookupEnvironment):
    """Answers one read and no more, so that the seconds of the budget run out."""

    async def _wait(self) -> None:
        if self._reads:
            await asyncio.Event().wait()


def boxed_lookup() -> SandboxedLookup:
    """Its box is one in memory, which can be killed like any other."""
    world = SandboxedLookup()
    world.use_sandboxes(MemorySandboxProvider())
    return world


@dataclass(kw_only=True, slots=True)
class Scenario:
    """One golden episode: the world, the policy's words, one a turn, and what is put in."""

    world: Callable[[], AsyncEnvironment]
    task: Task
    says: Sequence[str | ToolCall]
    budgets: Budgets = field(default_factory=lambda: Budgets(8, 512))
    fault: FaultConfig | None = None
    branch_of: str = ""
    branch_step: int | None = None


def lookup(*says: str, **fields: Any) -> Scenario:
    """An episode of the lookup world."""
    return Scenario(world=LookupEnvironment, task=CHAIN, says=says, **fields)


def guess(*says: str, **fields: Any) -> Scenario:
    """An episode of the guessing world."""
    return Scenario(world=lambda: GuessEnvironment(3), task=NUMBER, says=says, **fields)


def _fault(kind: Any, **fields: Any) -> FaultConfig:
    return FaultConfig(kind=kind, **({"rate": 1.0} if kind == "failed_reset" else {"steps": (2,)}), **fields)


SCENARIOS: dict[str, Scenario] = {
    "lookup_solved": lookup(*SOLUTION),
    "lookup_wrong": lookup("<call>get k03</call>", "v07"),
    "lookup_unknown_key": lookup("<call>get k00</call>", "<call>get</call>", "v42"),
    "lookup_unreadable_call": lookup("<call>get k03", "<call>get k03</call>", "v42"),
    "lookup_two_calls": lookup("<call>get k03</call><call>get k17</call>", "v42"),
    "lookup_max_turns": lookup("<call>get k03</call>", budgets=Budgets(3, 512)),
    "lookup_max_tokens": lookup("<call>get k03</call>", budgets=Budgets(8, 24)),
    "lookup_timeout": lookup(*SOLUTION, fault=_fault("timeout")),
    "lookup_server_error": lookup(*SOLUTION, fault=_fault("server_error", text="find k00")),
    "lookup_changed_page": lookup(*SOLUTION, fault=_fault("changed_page", text="k17 v00")),
    "lookup_lost_reply": lookup(*SOLUTION, fault=_fault("lost_reply")),
    "lookup_duplicate_effect": lookup(*SOLUTION, fault=_fault("duplicate_effect")),
    "lookup_failed_reset": lookup(*SOLUTION, fault=_fault("failed_reset")),
    "lookup_branch": lookup("", "", "v13", branch_of="lookup_solved", branch_step=2),
    "guess_right": guess("50", "40"),
    "guess_far": guess("90", "80", "70"),
    "guess_invalid": guess("50", "no idea", "none"),
    "counter_env_truncated": Scenario(
        world=ScriptedEnvironment,
        task=Task("counter-golden", "counter", {"target": 9, "max_steps": 2}),
        says=(ToolCall("add", {"amount": 1}),),
    ),
    "counter_invalid_action": Scenario(
        world=ScriptedEnvironment,
        task=Task("counter-golden", "counter", {"target": 3}),
        says=(ToolCall("subtract", {"amount": 1}), ToolCall("add", {"amount": 2}), "done"),
    ),
    "desk_outside": Scenario(
        world=PriceDesk,
        task=Task("desk-golden", "price-desk", {"thing": "lamp"}),
        says=(ToolCall("ask", {"of": "lamp"}), ToolCall("ask", {"of": "lamp"}), "101"),
    ),
    "sandbox_killed": Scenario(world=boxed_lookup, task=CHAIN, says=SOLUTION, fault=_fault("kill_sandbox")),
    "slow_max_seconds": Scenario(world=StalledLookup, task=CHAIN, says=SOLUTION, budgets=Budgets(8, 512, 2.0)),
}


async def record(name: str) -> Episode:
    """Play a scenario; its episode, without times."""
    scenario = SCENARIOS[name]
    renderer, replies = _lookup_policy(scenario) if scenario.task is CHAIN else _char_policy(scenario)
    engine = ScriptedEngine(lambda request: replies[min(int(request.key.rsplit("/", 1)[1]), len(replies) - 1)])
    world = scenario.world()
    plan = EpisodePlan(
        attempt_id=AttemptId("golden", sorted(SCENARIOS).index(name), 0),
        task=scenario.task,
        seed=7,
        version=VersionRef("scripted", 0),
        sampling=SamplingParams(max_new_tokens=64, stop_token_ids=tuple(renderer.stop_token_ids)),
        budgets=scenario.budgets,
        prefix=await record(scenario.branch_of) if scenario.branch_of else None,
        branch_step=scenario.branch_step,
    )
    if scenario.fault is not None:
        world = with_faults(world, [scenario.fault], 7, first=True)
    played = await play_episode(plan, world, renderer, engine)
    return _timeless(played.episode)


def _lookup_policy(scenario: Scenario) -> tuple[Renderer, list[list[int]]]:
    with tempfile.TemporaryDirectory() as folder:
        for name, data in tokenizer_files().items():
            (Path(folder) / name).write_bytes(data)
        renderer = load_renderer(folder)
        tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    stops = renderer.stop_token_ids
    return renderer, [[*tokenizer.encode(str(text), add_special_tokens=False).ids, *stops] for text in scenario.says]


def _char_policy(scenario: Scenario) -> tuple[Renderer, list[list[int]]]:
    renderer = CharRenderer()
    replies = []
    for said in scenario.says:
        if isinstance(said, ToolCall):
            whole = renderer.render([Message(Role.ASSISTANT, tool_calls=(said,))], ())
            replies.append([*whole[1:-2], END])
        else:
            replies.append([*said.encode(), END])
    return renderer, replies


def _timeless(episode: Episode) -> Episode:
    """`episode` without what a clock put in, nor where in which file a fault was raised."""
    replace = msgspec.structs.replace
    turns = [
        replace(
            turn,
            started_s=0.0,
            ended_s=0.0,
            cost=replace(turn.cost, tool_s=0.0),
            tool_calls=tuple(replace(call, start_s=0.0, end_s=0.0) for call in turn.tool_calls),
        )
        for turn in episode.turns
    ]
    cost = replace(episode.cost, tool_s=0.0)
    fault = re.sub(r"^\S+\.py:\d+ in \S+: ", "", episode.fault)
    return replace(episode, turns=tuple(turns), cost=cost, stamps=Stamps(), duration_s=0.0, fault=fault)


async def main() -> None:
    """Write every golden episode."""
    for name in SCENARIOS:
        (EPISODES / f"{name}.msgpack").write_bytes(episode_codec.encode(await record(name)))
    sys.stdout.write(f"{len(SCENARIOS)} episodes in {EPISODES}\n")


if __name__ == "__main__":
    asyncio.run(main())
