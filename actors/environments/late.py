"""Sessions that are built by their first reset: a constructor that blocks holds up its own session only (case E11).

Owns the building of somebody else's environment in a thread, and what becomes of a session that is built after its
episode has ended: nobody waits for it, and it is closed all the same (case X4). Whoever awaits the reset gives it its
deadline; a thread cannot be stopped, so a constructor that hangs keeps its own.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from headrace.actors.environments.adapter import NOWHERE, AsyncEnvironment, UnbuiltEnvironment
from headrace.platform.errors import DeadlineExceeded, EnvironmentFault
from headrace.platform.records.episode import Provenance
from headrace.platform.records.message import Message, Observation, StepResult, Task, ToolSpec

_log = logging.getLogger(__name__)
_CLOSE_S = 10.0

Build = Callable[[], AsyncEnvironment]
"""Makes a session; may block. Never raises: what cannot be built fails in its `reset`."""


class Builder:
    """Builds sessions in the threads of `executor`."""

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        self._executor = executor
        self._left: dict[asyncio.Future[AsyncEnvironment], asyncio.Task[None]] = {}

    def begin(self, build: Build) -> asyncio.Future[AsyncEnvironment]:
        """Call `build` in a thread."""
        return asyncio.get_running_loop().run_in_executor(self._executor, build)

    def leave(self, building: asyncio.Future[AsyncEnvironment]) -> None:
        """Nobody waits for it any more: close it when it is built."""
        if building not in self._left:
            self._left[building] = asyncio.create_task(self._closed(building))

    async def close(self) -> None:
        """Wait a little for the sessions that were left to be built and closed."""
        if self._left:
            _, late = await asyncio.wait(set(self._left.values()), timeout=_CLOSE_S)
            if late:
                _log.warning("%d environments are still being built, or do not close", len(late))

    async def _closed(self, building: asyncio.Future[AsyncEnvironment]) -> None:
        try:
            await (await building).close()
        except (Exception, SystemExit) as error:
            _log.warning("an environment that came too late is not closed: %s: %s", type(error).__name__, error)
        finally:
            del self._left[building]


class LateEnvironment:
    """Stands for a session until its first reset has built it.

    Args:
        name: of the environment, until the session says it.
        version: likewise.
        build: see `Build`.
        builder: where it is built.
    """

    def __init__(self, name: str, version: str, build: Build, builder: Builder) -> None:
        self.name, self.version = name, version
        self._build, self._builder = build, builder
        self._building: asyncio.Future[AsyncEnvironment] | None = None

    @property
    def inner(self) -> AsyncEnvironment | None:
        """The session, once it is built."""
        return self._building.result() if self._building is not None and self._building.done() else None

    @property
    def provenance(self) -> Provenance:
        """That of the session."""
        return self.inner.provenance if self.inner is not None else NOWHERE

    def tools(self) -> Sequence[ToolSpec]:
        """See `Environment.tools`; none before the reset."""
        return self.inner.tools() if self.inner is not None else ()

    async def built(self) -> AsyncEnvironment:
        """The session, which is built by the first who asks. Who stops waiting does not stop the building."""
        if self._building is None:
            self._building = self._builder.begin(self._build)
        session = await asyncio.shield(self._building)
        if session.version:  # what could not be built does not know it
            self.name, self.version = session.name, session.version
        return session

    async def built_within(self, seconds: float) -> AsyncEnvironment:
        """The session, for those who need it before its reset; one that takes longer fails in `reset`."""
        try:
            async with asyncio.timeout(seconds):
                return await self.built()
        except TimeoutError:
            await self.close()
            told = f"{self.name} was not built within {seconds:g} s"
            return UnbuiltEnvironment(self.name, DeadlineExceeded(told))
        except asyncio.CancelledError:
            await self.close()
            raise

    async def reset(self, task: Task, seed: int) -> Observation:
        """See `Environment.reset`. Builds the session first."""
        session = await self.built()
        return await session.reset(task, seed)

    async def step(self, message: Message, key: str) -> StepResult:
        """See `Environment.step`."""
        if self.inner is None:
            raise EnvironmentFault(f"{self.name}: step before reset of the episode", transient=False)
        return await self.inner.step(message, key)

    async def close(self) -> None:
        """See `Environment.close`. Does not wait for a session that is still being built."""
        if self.inner is not None:
            await self.inner.close()
        elif self._building is not None:
            self._builder.leave(self._building)
