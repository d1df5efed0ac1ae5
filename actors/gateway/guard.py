"""Between policy and environment: every call is decided by the gateway before anything happens.

::

    policy ─ message ─► GuardedEnvironment ── decide ─► gateway process
                          │      ▲   ▲                    │ denied, or performed there
                          │      │   └────── verdicts ◄───┘
                          │      └── performed here: in the box, or by the environment, which sees allowed calls only
                          └─ settle ─► gateway process ─► bounded and plain answers, in the order of the calls

Owns the splitting of a message into calls by who performs them, the putting together of their answers, and what the
episode's record says of them. It decides nothing. Where the gateway cannot be asked, nothing happens and the error ends
the episode (P25).
"""

import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from headrace.actors.environments.adapter import AsyncEnvironment
from headrace.actors.environments.cassette import Cassette, External
from headrace.actors.gateway.answers import Answers
from headrace.actors.gateway.boxed import KINDS as BOXED_KINDS
from headrace.actors.gateway.boxed import BoxedTools, boxed_tools
from headrace.actors.gateway.decisions.tier import needs_approval
from headrace.actors.gateway.planted import Planted
from headrace.actors.gateway.policy import Mount, Policy
from headrace.actors.gateway.recorded import RecordedVerdicts
from headrace.actors.gateway.shown import shown
from headrace.platform.contracts import Audited, CallVerdict, Sandbox, SandboxProvider, ToolSession
from headrace.platform.errors import EnvironmentFault, GatewayAway
from headrace.platform.hashing import hash_value
from headrace.platform.records.episode import Provenance
from headrace.platform.records.message import HashPair, Message, Observation, StepResult, Task, ToolCall, ToolSpec
from headrace.platform.records.permissions import Grant

_log = logging.getLogger(__name__)
_OF_A_STEP = 0.9  # the rest is for what comes after the commands


class GatewayDoor(Protocol):
    """What a guard needs of a gateway's client."""

    async def mounted(self, mounts: tuple[Mount, ...]) -> tuple[ToolSpec, ...]:
        """The tools behind mounts that the gateway performs itself."""

    def session(
        self,
        scope: str,
        policy: Policy,
        tools: Sequence[ToolSpec],
        grants: tuple[Grant, ...] = (),
        trusted: tuple[str, ...] = (),
    ) -> ToolSession:
        """A session, opened by its first decision."""


@dataclass(slots=True)
class _Toolbox:
    """What is mounted beside the environment's own tools."""

    boxed: BoxedTools
    performed: tuple[ToolSpec, ...] = ()
    history: list[list[Any]] = field(default_factory=list)

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        return (*self.boxed.specs.values(), *self.performed)


class GuardedEnvironment:
    """A session behind the gateway.

    Args:
        inner: the session.
        policy: the recipe's for it.
        door: opens the way to the gateway of this node; called by the first use.
        boxes: who makes a box for boxed tools, where the session has none of its own.
        step_s: the deadline of a step, within which all boxed commands of a turn have to fit.
    """

    def __init__(
        self,
        inner: AsyncEnvironment,
        policy: Policy,
        door: Callable[[], Awaitable[GatewayDoor]],
        boxes: SandboxProvider | None = None,
        step_s: float = 30.0,
    ) -> None:
        self.inner = inner
        self.name, self.version = inner.name, inner.version
        self._policy, self._door, self._boxes = policy, door, boxes
        self._step_s = step_s * _OF_A_STEP
        self._toolbox = _Toolbox(boxed_tools(policy.mounts))
        self._recorded = RecordedVerdicts()
        self._planted = Planted()
        self._box: Sandbox | None = None
        self._task: Task | None = None
        self._trusted: tuple[str, ...] = ()
        self._session: ToolSession | None = None
        self._audited = Audited()
        self._done: dict[str, tuple[Message, StepResult]] = {}
        self._state = HashPair()

    @property
    def provenance(self) -> Provenance:
        """That of the session, with what the gateway said and counted."""
        inner, kept = self.inner.provenance, self._recorded.kept
        return msgspec.structs.replace(
            inner,
            external={**inner.external, **kept} if kept else inner.external,
            audit_head=self._audited.head,
            safety=self._planted.counted(self._audited.safety),
            gateway_policy=self._policy.digest,
        )

    def load_cassette(self, external: External, live: bool = False) -> Cassette | None:
        """See `load_cassette` of the cassette's module."""
        return self._recorded.load(self.inner, external, live)

    def tools(self) -> Sequence[ToolSpec]:
        """The session's own, and those that are mounted."""
        mounted = self._toolbox.specs
        return (*self.inner.tools(), *mounted) if mounted else self.inner.tools()

    async def reset(self, task: Task, seed: int) -> Observation:
        """See `Environment.reset`. What is mounted is made ready first; a box waits for its place here (P21).

        Raises:
            GatewayAway: there are tools that the gateway performs, and it cannot be reached.
            EnvironmentFault: a mounted tool and one of the session have one name.
        """
        await self._end_quietly()
        self._task, self._done, self._audited = task, {}, Audited()
        self._recorded.kept.clear()
        self._planted = Planted()
        self._toolbox.history.clear()
        at_gateway = tuple(mount for mount in self._policy.mounts if mount.kind not in BOXED_KINDS)
        if at_gateway and not self._toolbox.performed:
            self._toolbox.performed = await (await self._door()).mounted(at_gateway)
        try:
            observation = await self.inner.reset(task, seed)
        finally:  # a session on a host, or one that is built now, learns them here
            self.name, self.version = self.inner.name, self.inner.version
        if self._toolbox.boxed.specs and _box_of(self.inner) is None:
            await self._own_box()
        names = [spec.name for spec in self.tools()]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            told = f"{', '.join(twice)} is mounted by the recipe and offered by {self.name}; give the mount a `name`"
            raise EnvironmentFault(told, transient=False)
        self._trusted = tuple(message.content for message in observation.messages if message.content)
        self._state = observation.state_hash
        return observation

    async def finish_episode(self) -> None:
        """The episode has ended well: get the audit's last word, while a failure can still be one of the episode.

        Raises:
            GatewayAway: nobody can say that all that was decided is on record.
        """
        await self._end_session()

    async def step(self, message: Message, key: str) -> StepResult:
        """See `Environment.step`; without calls it is the session's alone, which sees none that were not allowed.

        Raises:
            ValueError: the key belongs to another message (P25).
            GatewayAway, InDoubt, SafetyBlock: see `ToolSession`.
        """
        if (known := self._done.get(key)) is not None:
            if known[0] != message:
                raise ValueError(f"the key {key!r} belongs to another step")
            return known[1]
        if message.tool_calls and self.tools():
            result = await self._called(message, key)
        else:  # where there is nothing to call, what looks like a call is none
            result = await self.inner.step(_only(message, ()) if message.tool_calls else message, key)
        self._state = result.state_hash
        if history := self._toolbox.history:  # the calls that were made, though not by the session, are part of it
            result = msgspec.structs.replace(result, state_hash=hash_value([result.state_hash.canonical, history]))
        self._planted.show(result.metadata.get("planted"))
        self._done[key] = (message, result)
        return result

    async def close(self) -> None:
        """See `Environment.close`. The audit's head is had before anything is let go."""
        try:
            await self._end_quietly()
        finally:
            try:
                await self.inner.close()
            finally:
                if self._box is not None:
                    await self._box.close()
                    self._box = None

    # --- one step -----------------------------------------------------------------------------------------------------

    async def _called(self, message: Message, key: str) -> StepResult:
        began = time.monotonic()
        calls, step = message.tool_calls, len(self._done) + 1
        session = await self._opened(key)
        recorded = self._recorded.find(step, calls, self._outside)
        if recorded:
            session.recorded([calls[index] for index in recorded])
        verdicts: Sequence[CallVerdict] = ()
        try:
            verdicts = await self._verdicts(session, calls, key, recorded)
        finally:  # the model has followed what it was told, whatever becomes of it
            self._planted.follow(calls, verdicts)
        answers = Answers(calls, verdicts, began)
        self._recorded.keep(step, calls, dict(enumerate(verdicts)))
        box = self._toolbox.boxed
        own = [index for index in answers.allowed if calls[index].name not in box.specs]
        for index in answers.allowed:
            if calls[index].name in box.specs:
                left_s = self._step_s - (time.monotonic() - began)
                answers.perform(index, await box.perform(self._its_box(), calls[index], left_s))
        result = None
        if own:
            allowed = message if len(own) == len(calls) else _only(message, own)
            result = await self.inner.step(allowed, key)
            answers.take(own, result.messages)
        for index in recorded.keys() & answers.allowed:  # the gateway knows nothing of these
            spec = next(spec for spec in self.tools() if spec.name == calls[index].name)
            answers.settle([index], [shown(calls[index], spec, self._policy, *answers.outputs([index]))])
        if decided := [index for index in answers.allowed if index not in recorded]:
            answers.settle(decided, await session.settle(answers.outputs(decided), key))
        whole = answers.result(result, self._state)
        for index in answers.not_own:
            self._toolbox.history.append([calls[index].name, calls[index].arguments, whole.calls[index].result_hash])
        return whole

    async def _verdicts(
        self, session: ToolSession, calls: Sequence[ToolCall], key: str, recorded: Mapping[int, CallVerdict]
    ) -> Sequence[CallVerdict]:
        """The recorded ones of a replay, and for all other calls what the gateway decides now."""
        asked = [index for index in range(len(calls)) if index not in recorded]
        decided = await session.decide([calls[index] for index in asked], key) if asked else ()
        if len(decided) != len(asked):
            raise GatewayAway(f"the gateway decided on {len(decided)} of {len(asked)} calls")
        both = {**recorded, **dict(zip(asked, decided, strict=True))}
        return [both[index] for index in range(len(calls))]

    def _outside(self) -> set[str]:
        """The tools whose calls somebody outside of the episode answers or approves."""
        approved = {spec.name for spec in self.tools() if needs_approval(spec)}
        return approved | {spec.name for spec in self._toolbox.performed}

    # --- what a session stands on -------------------------------------------------------------------------------------

    async def _opened(self, key: str) -> ToolSession:
        """The gateway's session; begun by the first call, whose key names episode and branch (P26)."""
        if self._session is None:
            door = await self._door()
            scope = f"{key.rpartition('/')[0]}#{secrets.token_hex(8)}"
            own = (*self.inner.tools(), *self._toolbox.boxed.specs.values())
            grants = self._task.grants if self._task is not None else ()
            self._session = door.session(scope, self._policy, own, grants, self._trusted)
        return self._session

    async def _end_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            self._audited = await session.close()

    async def _end_quietly(self) -> None:
        """The same for an episode that broke: what was allowed was decided before; only the last word is missing."""
        try:
            await self._end_session()
        except EnvironmentFault as away:
            _log.warning("%s: the gateway did not say its last word: %s", self.name, away)

    def _its_box(self) -> Sandbox:
        box = self._box or _box_of(self.inner)
        if box is None:
            raise EnvironmentFault(f"{self.name} has no sandbox for its tools before reset and after close", False)
        return box

    async def _own_box(self) -> None:
        if self._boxes is None:
            told = "its tools run in a sandbox; name one in the recipe, such as `sandbox: bubblewrap`"
            raise EnvironmentFault(f"{self.name}: {told}", transient=False)
        if self._box is not None:
            box, self._box = self._box, None
            await box.close()
        self._box = await self._boxes.create()


def _only(message: Message, indices: Sequence[int]) -> Message:
    """`message` with some of its calls."""
    return msgspec.structs.replace(message, tool_calls=tuple(message.tool_calls[index] for index in indices))


def _box_of(environment: object) -> Sandbox | None:
    """The box of a session, behind what it is wrapped in; None where it has none."""
    from headrace.actors.environments.sandboxed import SandboxedEnvironment

    while environment is not None and not isinstance(environment, SandboxedEnvironment):
        environment = getattr(environment, "inner", None)
    return environment.box if environment is not None else None
