"""Faults on purpose: a session that fails where a recipe says so, and again where a record says that it did.

    with_faults ──────────► draws for each step ──┐
                                                  ├─► _FaultySession ─► the session itself
    with_recorded_faults ─► looks up each step ───┘

What strikes a step is a function of the seed, the kind and the step's number alone: the order of a recipe's entries
does not matter. Steps are numbered as they reach the world, from 1; 0 is the reset. Each strike is noted with all that
a replay needs to let the episode go the same way. The world's state is touched by doing steps only: a changed text is
changed on its way out.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

from headrace.actors.environments.adapter import AsyncEnvironment
from headrace.platform.config.faults import FaultConfig, FaultKind
from headrace.platform.errors import ConfigError, DeadlineExceeded, EnvironmentFault, SandboxDied
from headrace.platform.records.episode import InjectedFault, Provenance
from headrace.platform.records.message import Message, Observation, StepResult, Task, ToolSpec
from headrace.platform.seeding import derive_seed

_TEXTS: dict[str, str] = {
    "server_error": "HTTP 500 Internal Server Error. The tool is not available now.",
    "changed_page": "This page has changed. What was here is gone.",
}

Strikes = Callable[[int], dict[FaultKind, dict[str, Any]]]
"""What strikes at a step: kinds, each with its detail."""


@runtime_checkable
class _HasBox(Protocol):
    async def kill_box(self) -> None: ...


def check_faults(faults: Sequence[FaultConfig], can_kill: bool) -> None:
    """Refuse faults that cannot be put in. Raises ConfigError.

    Args:
        faults: those of one environment.
        can_kill: its tools run in sandboxes of this process.
    """
    if not can_kill and any(fault.kind == "kill_sandbox" for fault in faults):
        raise ConfigError(
            "faults: kill_sandbox needs a sandbox to kill; give the environment one: `sandbox: bubblewrap`"
        )


def with_faults(
    environment: AsyncEnvironment, faults: Sequence[FaultConfig], seed: int, first: bool
) -> AsyncEnvironment:
    """`environment`, which fails as `faults` say.

    Args:
        environment: a session that was not reset yet.
        faults: those of its recipe entry.
        seed: of the attempt; another attempt has another and meets others.
        first: it is the first attempt of its slot, which meets the faults of fixed steps.
    """

    def strikes(step: int) -> dict[FaultKind, dict[str, Any]]:
        found: dict[FaultKind, dict[str, Any]] = {}
        for fault in faults:
            if (fault.kind == "failed_reset") != (step == 0) or fault.kind in found:
                continue
            drawn = random.Random(derive_seed("fault", seed, fault.kind, step)).random()
            if drawn < fault.rate or (first and step in fault.steps):
                found[fault.kind] = _detail(fault)
        return found

    return _FaultySession(environment, strikes, is_replay=False) if faults else environment


def with_recorded_faults(environment: AsyncEnvironment, injected: Sequence[InjectedFault]) -> AsyncEnvironment:
    """`environment`, which fails as it did in an episode. No time passes, and no sandbox is killed, nor needed.

    Args:
        environment: a session that was not reset yet.
        injected: the `injected_faults` of the episode.
    """

    def strikes(step: int) -> dict[FaultKind, dict[str, Any]]:
        return {fault.kind: fault.detail for fault in injected if fault.turn == step}  # type: ignore[misc]

    return _FaultySession(environment, strikes, is_replay=True) if injected else environment


def _detail(fault: FaultConfig) -> dict[str, Any]:
    """What a replay needs to know of a fault besides step and kind."""
    if fault.kind in _TEXTS:
        return {"text": fault.text or _TEXTS[fault.kind]}
    return {"seconds": fault.seconds} if fault.kind == "timeout" else {}


class _FaultySession:
    """A session behind its faults. A key that was seen before is the same step, and meets the same faults (P25)."""

    def __init__(self, inner: AsyncEnvironment, strikes: Strikes, is_replay: bool) -> None:
        self.inner = inner
        self.name, self.version = inner.name, inner.version
        self._strikes = strikes
        self._is_replay = is_replay
        self._steps: dict[str, int] = {}
        self._injected: dict[tuple[int, str], InjectedFault] = {}

    @property
    def provenance(self) -> Provenance:
        """That of the session itself, with the faults that struck, in their order."""
        inner = self.inner.provenance
        return msgspec.structs.replace(inner, injected_faults=(*inner.injected_faults, *self._injected.values()))

    def tools(self) -> Sequence[ToolSpec]:
        """See `Environment.tools`."""
        return self.inner.tools()

    async def reset(self, task: Task, seed: int) -> Observation:
        """See `Environment.reset`."""
        self._steps.clear()
        self._injected.clear()
        if "failed_reset" in self._strikes(0):
            self._note(0, "failed_reset", {})
            raise EnvironmentFault("the reset failed (an injected fault)")
        try:
            return await self.inner.reset(task, seed)
        finally:  # a session on a host learns its version when it connects
            self.name, self.version = self.inner.name, self.inner.version

    async def step(self, message: Message, key: str) -> StepResult:
        """See `Environment.step`."""
        step = self._steps.setdefault(key, len(self._steps) + 1)
        strikes = self._strikes(step)
        if "timeout" in strikes:
            await self._time_out(step, strikes["timeout"])
        if "kill_sandbox" in strikes:
            return await self._killed(message, key, step, strikes["kill_sandbox"])
        result = await self.inner.step(message, key)
        if "lost_reply" in strikes:
            self._note(step, "lost_reply", {})
            result = await self.inner.step(message, key)
        if "duplicate_effect" in strikes and not _ends(result):  # what has ended cannot be done again
            self._note(step, "duplicate_effect", {})
            result = _done_twice(result, await self.inner.step(message, f"{key}/duplicate"))
        for kind in ("server_error", "changed_page"):
            if kind in strikes and result.messages:
                self._note(step, kind, strikes[kind])
                return _saying(result, strikes[kind]["text"])
        return result

    async def close(self) -> None:
        """See `Environment.close`."""
        await self.inner.close()

    async def _time_out(self, step: int, detail: dict[str, Any]) -> None:
        """Raises DeadlineExceeded."""
        self._note(step, "timeout", detail)
        if not self._is_replay:
            await asyncio.sleep(detail["seconds"])
        raise DeadlineExceeded(f"the step did not answer within {detail['seconds']} s (an injected fault)")

    async def _killed(self, message: Message, key: str, step: int, detail: dict[str, Any]) -> StepResult:
        """The step without its sandbox. Raises SandboxDied."""
        if self._is_replay:
            self._note(step, "kill_sandbox", detail)
            raise SandboxDied(detail["cause"])
        await _box_of(self.inner).kill_box()
        try:
            return await self.inner.step(message, key)
        except SandboxDied as died:
            self._note(step, "kill_sandbox", {"cause": str(died)})
            raise

    def _note(self, step: int, kind: str, detail: dict[str, Any]) -> None:
        self._injected[step, kind] = InjectedFault(step, kind, detail)


def _ends(result: StepResult) -> bool:
    return result.terminated or result.truncated


def _done_twice(first: StepResult, second: StepResult) -> StepResult:
    """What is told of a step that was done twice: the first reply, and the state after both. Where only the second one
    ended the episode, that end and its rewards count too: they are the world's."""
    told = msgspec.structs.replace(first, state_hash=second.state_hash)
    if not _ends(second):
        return told
    rewards = (*first.rewards, *second.rewards)
    return msgspec.structs.replace(told, rewards=rewards, terminated=second.terminated, truncated=second.truncated)


def _saying(result: StepResult, text: str) -> StepResult:
    """`result` with another text in each of its messages; a tool's answer stays the answer to its call."""
    changed = [Message(each.role, text, tool_call_id=each.tool_call_id) for each in result.messages]
    return msgspec.structs.replace(result, messages=tuple(changed))


def _box_of(environment: object) -> _HasBox:
    """The session with the box, behind what it is wrapped in. Raises EnvironmentFault where there is none."""
    while environment is not None and not isinstance(environment, _HasBox):
        environment = getattr(environment, "inner", None)
    if environment is None:
        raise EnvironmentFault("kill_sandbox: this environment has no sandbox that could be killed", transient=False)
    return environment
