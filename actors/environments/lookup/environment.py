"""The lookup world itself: reads are tool calls, anything else is the answer and ends the episode."""

import asyncio
import functools
import random
from collections.abc import Sequence

from headrace.actors.environments.base import ReplayedEnvironment
from headrace.platform.errors import ConfigError
from headrace.platform.hashing import hash_value
from headrace.platform.records.message import (
    Cost,
    Message,
    Observation,
    RewardComponent,
    StepResult,
    Task,
    ToolCall,
    ToolSpec,
)
from headrace.platform.records.status import RewardKind, Role, Status

_GET = ToolSpec(
    name="get",
    description="Read one key of the store. Answers KEY=VALUE, KEY=@OTHER (look there), or ? for an unknown key.",
    parameters={"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
)


# Looked up once: before Python 3.12 a member of an enum costs as much as a call.
_TOOL, _OK = Role.TOOL, Status.OK


class LookupEnvironment(ReplayedEnvironment):
    """One session.

    Args:
        latency_s: mean of a seeded exponential delay before each read; 0 answers at once.
    """

    name = "lookup"
    version = "1"

    def __init__(self, latency_s: float = 0.0) -> None:
        super().__init__()
        if latency_s < 0:
            raise ConfigError(f"lookup: latency_s must be at least 0, not {latency_s}")
        self._latency_s = latency_s
        self._chain: list[str] = []
        self._answer = ""
        self._reads: list[str] = []
        self._delays: random.Random | None = None

    @staticmethod
    def demonstrate(task: Task) -> list[Message]:
        """Assistant messages that play `task` to its end: every read of the chain, then the value."""
        reads = [ToolCall(_GET.name, {"key": key}, "call_0") for key in task.data["chain"]]
        answer = Message(Role.ASSISTANT, str(task.data["answer"]))
        return [*(Message(Role.ASSISTANT, tool_calls=(read,)) for read in reads), answer]

    def tools(self) -> Sequence[ToolSpec]:
        """See `Environment.tools`."""
        return (_GET,)

    async def _reset(self, task: Task, seed: int) -> Observation:
        self._chain, self._answer = list(task.data["chain"]), str(task.data["answer"])
        self._reads = []
        self._delays = random.Random(seed) if self._latency_s else None
        return Observation((Message(Role.USER, f"find {self._chain[0]}"),), hash_value(self._state("asked")))

    async def _step(self, message: Message) -> StepResult:
        if not message.tool_calls:
            return self._judged(message)
        await self._wait()
        return self._answered(message.tool_calls, [self._read(call) for call in message.tool_calls])

    async def _wait(self) -> None:
        if self._delays is not None:
            await asyncio.sleep(self._delays.expovariate(1 / self._latency_s))

    def _judged(self, message: Message) -> StepResult:
        right = message.content == self._answer
        return StepResult(
            rewards=(RewardComponent(RewardKind.OUTCOME, float(right)),),
            terminated=True,
            state_hash=hash_value(self._state(f"answered {message.content}")),
        )

    def _answered(self, calls: Sequence[ToolCall], answers: Sequence[str]) -> StepResult:
        """What the calls are told; an empty answer is a mistake of the model."""
        messages, status = [], _OK
        for call, answer in zip(calls, answers, strict=True):
            if not answer:
                answer, status = "?", Status.MODEL_INVALID_ACTION
            messages.append(Message(_TOOL, answer, tool_call_id=call.call_id))
        return StepResult(
            messages=tuple(messages),
            status=status,
            cost=_cost(len(messages)),
            state_hash=hash_value(self._state("reading")),
        )

    def _asked(self, call: ToolCall) -> str:
        """The key that a call asks for, which is noted down; empty for a tool that does not exist."""
        key = str(call.arguments.get("key", ""))
        self._reads.append(f"{call.name} {key}")
        return key if call.name == _GET.name else ""

    def _read(self, call: ToolCall) -> str:
        """What the store says, empty for a tool or key that does not exist."""
        key = self._asked(call)
        if key not in self._chain:
            return ""
        index = self._chain.index(key)
        return f"{key}=@{self._chain[index + 1]}" if index + 1 < len(self._chain) else f"{key}={self._answer}"

    def _state(self, phase: str) -> list[object]:
        return [self._chain, self._answer, self._reads, phase]


@functools.lru_cache(maxsize=64)
def _cost(reads: int) -> Cost:
    """Shared by all steps that are alike: a session keeps every result."""
    return Cost(tool_calls=reads)
