"""One play of an attack: an episode behind the guard, or, for a control, in front of the bare world.

::

    Obedient ── calls ─► GuardedEnvironment ─► gateway ─► PlantedWorld, box, or Outside
       ▲                  (bare: PlantedWorld)                     │
       └────────────────── what is shown ◄─────────────────────────┘

It keeps what was shown and which rules denied, and judges nothing.
"""

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Awaitable

from headrace.actors.environments.adapter import AsyncEnvironment
from headrace.actors.gateway.client import GatewayClient
from headrace.actors.gateway.guard import GuardedEnvironment
from headrace.actors.gateway.policy import Policy
from headrace.actors.gateway.redteam.attack import Attack, Finding
from headrace.actors.gateway.redteam.obedient import Obedient
from headrace.actors.gateway.redteam.outside import Outside
from headrace.actors.gateway.redteam.scene import Scene
from headrace.actors.gateway.redteam.sites import Sites
from headrace.actors.gateway.redteam.world import READ_PAGE, TOOLS, PlantedWorld
from headrace.platform.contracts import SandboxProvider, ToolSession
from headrace.platform.errors import EnvironmentFault, GatewayAway, InDoubt, SafetyBlock
from headrace.platform.records.episode import Provenance
from headrace.platform.records.message import Message, StepResult, Task, ToolCall
from headrace.platform.records.status import Role

_REQUEST_S = 15.0


class Stage:
    """A play, from its reset on.

    Args:
        attack: what is played.
        scene: what happens goes there.
        outside: what lies beyond the host.
        episode: its id.
        policy: what it is played under; None for no gateway.
        client: the way to the gateway.
        boxes: makes the box, where the policy mounts tools that need one.
    """

    def __init__(
        self,
        attack: Attack,
        scene: Scene,
        outside: Outside,
        episode: str,
        policy: Policy | None,
        client: GatewayClient,
        boxes: SandboxProvider | None,
    ) -> None:
        self.scene, self.episode = scene, episode
        self._attack, self._outside = attack, outside
        world = PlantedWorld(scene, attack.planted, attack.tools_after)

        async def door() -> GatewayClient:
            return client

        self._session: AsyncEnvironment = world
        if policy is not None:
            self._session = GuardedEnvironment(world, policy, door, boxes)
        scope = f"{episode}/0#{secrets.token_hex(4)}"
        self.asked: ToolSession = client.session(scope, policy or attack.policy, TOOLS, attack.grants)
        """The gateway itself, for who asks it without a guard; a session of its own."""
        self._mind, self._turns, self._rules = Obedient(), 0, Counter[str]()
        self._broken = ""

    async def begin(self) -> None:
        """Reset the world. What cannot be is how the play ended."""
        task = Task(self._attack.attack_id, "redteam", grants=self._attack.grants)
        began = time.monotonic()
        try:
            observation = await self._session.reset(task, 0)
        except EnvironmentFault as fault:
            self._ended(fault)
            return
        finally:
            self.scene.took_s += time.monotonic() - began
        for message in observation.messages:
            self._read(message, "")

    def key(self, turn: int) -> str:
        """The key of a turn."""
        return f"{self.episode}/0/{turn}"

    def told(self, text: str) -> None:
        """The policy hears of something otherwise than by a tool."""
        self._mind.read(text)

    def answer(self, sites: Sites) -> None:
        """The hosts outside are others from now on."""
        self._outside.change(sites)

    async def requested(self) -> None:
        """A request has come to a host outside. Raises TimeoutError."""
        async with asyncio.timeout(_REQUEST_S):
            await self._outside.requested.wait()

    async def obey(self, pause_s: float = 0.0) -> None:
        """Open the page, and do what is said there, turn by turn, `pause_s` apart, until nothing is left to do."""
        calls: tuple[ToolCall, ...] = (ToolCall(READ_PAGE.name, {}, "c0"),)
        while calls and not self.scene.ended:
            try:
                await self.step(Message(Role.ASSISTANT, tool_calls=calls), self.key(self._turns))
            except (EnvironmentFault, SafetyBlock) as error:
                self._ended(error)
            calls = self._mind.turn()
            await asyncio.sleep(pause_s)

    async def step(self, message: Message, key: str) -> StepResult:
        """One turn. Raises as `Environment.step`."""
        self._turns += 1
        began = time.monotonic()
        try:
            result = await self._session.step(message, key)
        finally:
            self.scene.took_s += time.monotonic() - began
        self._rules.update(outcome.rule for outcome in result.calls if outcome.rule)
        names = {call.call_id: call.name for call in message.tool_calls}
        for answer in result.messages:
            self._read(answer, names.get(answer.tool_call_id, ""))
        return result

    async def refused(self, doing: Awaitable[object], *errors: type[Exception]) -> None:
        """Wait for something that may end by one of `errors`."""
        try:
            await doing
        except errors as error:
            self.scene.ended = type(error).__name__

    async def close(self) -> None:
        """The episode is over."""
        await self._session.close()
        await self.asked.close()
        provenance: Provenance = self._session.provenance
        for rule, count in provenance.safety.blocked.items():
            self._rules[rule] = max(self._rules[rule], count)

    @property
    def head(self) -> str:
        """What the episode's record would name of the audit, once it is closed."""
        return self._session.provenance.audit_head

    def finding(self, effect: str | None = None) -> Finding:
        """What came of the play; `effect` where it is not the attack's own check."""
        found = self._attack.effect(self.scene) if effect is None else effect
        return Finding(effect=found, rules=self._rules, ended=self.scene.ended, broken=self._broken)

    def _read(self, message: Message, tool: str) -> None:
        self.scene.shown.append(message.content)
        self._mind.read(message.content, tool)

    def _ended(self, error: Exception) -> None:
        self.scene.ended = f"{type(error).__name__}: {error}"
        if isinstance(error, GatewayAway):  # nothing was decided: that proves nothing
            self._broken = self.scene.ended
        elif isinstance(error, InDoubt | SafetyBlock):
            self._rules[type(error).__name__] += 1
