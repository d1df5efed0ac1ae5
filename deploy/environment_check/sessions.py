"""Sessions whose every call has a deadline of its own, so that what hangs is reported by its name.

Plain methods run in a thread, as they do in a run (case E11). What hangs is left behind, and the check goes on with a
fresh session (case X15).
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from headrace.actors.environments.answers import checked_observation, checked_step, checked_tools
from headrace.actors.environments.kind import EnvironmentKind
from headrace.actors.environments.off_loop import OffLoop
from headrace.actors.environments.sandboxed import SandboxedEnvironment
from headrace.actors.world_resources import WorldResources
from headrace.platform.config.sandbox import SandboxConfig
from headrace.platform.contracts import Environment, MaybeAwaitable, SandboxProvider
from headrace.platform.errors import ConfigError, DeadlineExceeded
from headrace.platform.records.message import Message, Observation, StepResult, Task, ToolSpec

T = TypeVar("T")

Provide = Callable[[SandboxConfig], SandboxProvider]
"""Who makes boxes of a kind. Raises ConfigError where none that is accepted works on this host."""


@asynccontextmanager
async def sessions_of(
    kind: EnvironmentKind, args: dict[str, Any], sandbox: SandboxConfig | None, provide: Provide | None = None
) -> AsyncIterator[Callable[[], Environment]]:
    """Who makes sessions as a run does, with what they need for as long as the block runs and on its event loop.

    Args:
        kind: of the environment.
        args: the recipe's arguments of it.
        sandbox: the recipe's; None where it names none.
        provide: who makes boxes; None is as in a run.

    Raises:
        ConfigError: the environment can use no sandbox, or none that is accepted works on this host.
    """
    if sandbox is not None and kind.sandboxed is None:
        raise ConfigError("it runs nothing that could be put into a sandbox; check it without one")
    resources, providers = WorldResources(), dict[SandboxConfig, SandboxProvider]()
    provide = provide or resources.sandboxes

    def make() -> Environment:
        in_box = kind.sandboxed if sandbox is not None else None
        environment = (in_box or kind.environment)(args)
        if isinstance(environment, SandboxedEnvironment):  # some always need a box
            config = sandbox or SandboxConfig()
            if config not in providers:
                providers[config] = provide(config)
            environment.use_sandboxes(providers[config])
        return environment

    try:
        yield make
    finally:
        for provider in providers.values():
            await provider.close()


class Calls:
    """The calls of one check: which are on their way, and the first that came to no end. Threads may share it."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.late = ""
        self._running: dict[object, tuple[str, float]] = {}

    async def timed(self, name: str, off_loop: OffLoop, method: Callable[..., MaybeAwaitable[T]], *args: Any) -> T:
        """What the method gives.

        Raises:
            DeadlineExceeded: there was no answer in time; `late` then says so, whatever becomes of the exception.
        """
        began, mark = time.monotonic(), object()
        self._running[mark] = (name, began)
        try:
            async with asyncio.timeout(self.deadline_s) as timer:
                answer = await off_loop.call(method, *args)
        except TimeoutError:
            if not timer.expired():
                raise
            raise self._late(name) from None
        finally:
            del self._running[mark]
        if time.monotonic() - began > self.deadline_s:  # it kept even the timer from going off
            raise self._late(name)
        return answer

    def stuck(self, grace_s: float) -> str:
        """What to say of a call that holds up the loop and so its timer; empty where there is none."""
        for name, since in list(self._running.values()):
            if time.monotonic() - since > self.deadline_s + grace_s:
                return f"{self._told(name)}, and blocks the event loop; a plain method would run in a thread"
        return ""

    def _late(self, name: str) -> DeadlineExceeded:
        self.late = self.late or self._told(name)
        return DeadlineExceeded(self.late)

    def _told(self, name: str) -> str:
        return f"{name} gave no answer within {self.deadline_s:g} s"


class TimedSession:
    """An `Environment` around another; what comes out of it is checked for its type, as in a run."""

    def __init__(self, environment: Environment, calls: Calls) -> None:
        self.name, self.version = environment.name, environment.version
        self._environment = environment
        self._calls = calls
        self._off_loop = OffLoop()

    @property
    def demonstrate(self) -> Any:
        """See `scripts.script_for`."""
        return getattr(self._environment, "demonstrate", None)

    def tools(self) -> Sequence[ToolSpec]:
        """See `Environment.tools`."""
        return checked_tools(self._environment.tools(), self._environment.tools)

    async def reset(self, task: Task, seed: int) -> Observation:
        """See `Environment.reset`."""
        reset = self._environment.reset
        return checked_observation(await self._timed("reset", reset, task, seed), reset)

    async def step(self, message: Message, key: str) -> StepResult:
        """See `Environment.step`."""
        step = self._environment.step
        return checked_step(await self._timed("step", step, message, key), step)

    async def snapshot(self) -> str:
        """See `Environment.snapshot`."""
        return await self._timed("snapshot", self._environment.snapshot)

    async def restore(self, snapshot_id: str) -> None:
        """See `Environment.restore`."""
        await self._timed("restore", self._environment.restore, snapshot_id)

    async def clone(self) -> "TimedSession":
        """See `Environment.clone`."""
        return TimedSession(await self._timed("clone", self._environment.clone), self._calls)

    async def close(self) -> None:
        """See `Environment.close`."""
        await self._timed("close", self._environment.close)

    async def _timed(self, name: str, method: Callable[..., MaybeAwaitable[T]], *args: Any) -> T:
        return await self._calls.timed(name, self._off_loop, method, *args)
