"""A counter world: the smallest environment that has everything a real one has."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace.platform.errors import EnvironmentFault
from headrace.platform.records.episode import Provenance
from headrace.platform.records.message import (
    Cost,
    HashPair,
    Message,
    Observation,
    RewardComponent,
    StepResult,
    Task,
    ToolCall,
    ToolSpec,
)
from headrace.platform.records.status import Capability, RewardKind, Role, SideEffectTier, Status

_ADD = ToolSpec(
    name="add",
    description="Add a number to the counter.",
    parameters={"type": "object", "properties": {"amount": {"type": "integer"}}, "required": ["amount"]},
    capability=Capability.WRITE,
    tier=SideEffectTier.WRITE,
)


@dataclass(kw_only=True, slots=True, frozen=True)
class _State:
    count: int
    target: int
    max_steps: int
    steps: int = 0
    ended: bool = False


class ScriptedEnvironment:
    """A counter that the policy brings to a target with the tool `add`; a message without a call submits.

    `task.data` may hold `target` (default 3) and `max_steps` (default 8, then the episode is truncated). The seed
    decides where the counter starts. The reward is 1 for a submission at the target and 0 for any other.
    """

    name = "counter"
    version = "1"
    provenance = Provenance()

    def __init__(self) -> None:
        self._state: _State | None = None
        self._results: dict[str, tuple[Message, StepResult]] = {}
        self._snapshots: dict[str, _State] = {}
        self.closed = False

    def tools(self) -> Sequence[ToolSpec]:
        """The tool `add`."""
        return (_ADD,)

    async def reset(self, task: Task, seed: int) -> Observation:
        """See `Environment.reset`."""
        state = _State(
            count=seed % 3, target=int(task.data.get("target", 3)), max_steps=int(task.data.get("max_steps", 8))
        )
        self._state = state
        self._results.clear()
        text = f"The counter is at {state.count}. Bring it to {state.target}, then say done."
        return Observation((Message(Role.USER, text),), _hashed(state), {"target": state.target})

    async def step(self, message: Message, key: str) -> StepResult:
        """See `Environment.step`.

        Raises:
            EnvironmentFault: before `reset`, after the end or `close`, or for a known key with another message.
        """
        if key in self._results:
            known, result = self._results[key]
            if known != message:
                raise EnvironmentFault(f"key {key!r} was used for another message", transient=False)
            return result
        state = self._present()
        if state.ended:
            raise EnvironmentFault("the episode is over; reset begins another", transient=False)
        state, result = _advance(state, message)
        self._state = state
        self._results[key] = (message, result)
        return result

    async def snapshot(self) -> str:
        """See `Environment.snapshot`."""
        snapshot_id = f"counter-{len(self._snapshots)}"
        self._snapshots[snapshot_id] = self._present()
        return snapshot_id

    async def restore(self, snapshot_id: str) -> None:
        """See `Environment.restore`.

        Raises:
            EnvironmentFault: for an unknown snapshot.
        """
        if snapshot_id not in self._snapshots:
            raise EnvironmentFault(f"no snapshot {snapshot_id!r}", transient=False)
        self._state = self._snapshots[snapshot_id]
        self._results.clear()

    async def clone(self) -> "ScriptedEnvironment":
        """See `Environment.clone`."""
        twin = ScriptedEnvironment()
        twin._state = self._present()
        return twin

    async def close(self) -> None:
        """See `Environment.close`."""
        self.closed = True

    def _present(self) -> _State:
        if self._state is None or self.closed:
            raise EnvironmentFault("reset comes first, and nothing after close", transient=False)
        return self._state


def _advance(state: _State, message: Message) -> tuple[_State, StepResult]:
    state = replace(state, steps=state.steps + 1)
    if not message.tool_calls:
        return _submitted(state)
    said, status = [], Status.OK
    for call in message.tool_calls:
        amount = call.arguments.get("amount")
        if call.name != "add" or not isinstance(amount, int):
            status = Status.MODEL_INVALID_ACTION
            said.append(_answer(call, f"there is one tool, add(amount: integer), not {call.name}{call.arguments}"))
        else:
            state = replace(state, count=state.count + amount)
            said.append(_answer(call, f"The counter is at {state.count}."))
    truncated = state.steps >= state.max_steps
    state = replace(state, ended=truncated)
    result = StepResult(
        messages=tuple(said),
        truncated=truncated,
        status=status,
        cost=Cost(tool_calls=len(said)),
        state_hash=_hashed(state),
        metadata={"steps": state.steps},
    )
    return state, result


def _submitted(state: _State) -> tuple[_State, StepResult]:
    state = replace(state, ended=True)
    outcome = RewardComponent(RewardKind.OUTCOME, float(state.count == state.target))
    return state, StepResult(
        rewards=(outcome,), terminated=True, state_hash=_hashed(state), metadata={"steps": state.steps}
    )


def _answer(call: ToolCall, text: str) -> Message:
    return Message(Role.TOOL, text, tool_call_id=call.call_id)


def _hashed(state: _State) -> HashPair:
    text = json.dumps([state.count, state.target, state.steps, state.ended])
    digest = hashlib.sha256(text.encode()).hexdigest()
    return HashPair(digest, digest)
