"""Parts that die and are started again, without knowing what a part is made of.

`Supervision` counts deaths: a part that dies more than `max_restarts` times while the run makes no progress ends the
run by name (case E9). `Supervised` is one part: its present handle, and how the next one is made. Whoever finds it dead
asks for a restart; several who do so at once wait for the same one.

A handle says that its part is gone by raising PartDied. Anything else that it raises is an answer, and passes through.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Generic, Literal, Protocol, TypeVar

from headrace.platform.errors import PartDied, RunFailed
from headrace.platform.store.events import RunEvent

H = TypeVar("H")
T = TypeVar("T")
_log = logging.getLogger(__name__)

OnDeath = Literal["ask again", "restart", "leave"]
"""What becomes of a question to a part that is found dead: the part is started again and asked again; it is started
again and PartDied is raised; or PartDied is raised and the part stays dead."""


class Tell(Protocol):
    """Where deaths and restarts are written down; `Events.add` is one."""

    def __call__(self, kind: RunEvent, **detail: Any) -> None:
        """Write one down."""


class Supervision:
    """Counts deaths by part; reads no clock.

    Args:
        max_restarts: how often a part may be started again without progress in between.
        tell: is told of every death and every restart.
    """

    def __init__(self, max_restarts: int, tell: Tell) -> None:
        self._max_restarts = max_restarts
        self._tell = tell
        self._since_progress: Counter[str] = Counter()
        self._furthest = 0
        self.restarts: Counter[str] = Counter()

    def reached(self, step: int) -> None:
        """Learner step `step` is done. Steps that are done again after a resume are no progress: a run that never
        comes further than its last checkpoint must end."""
        if step > self._furthest:
            self._furthest = step
            self._since_progress.clear()

    def died(self, part: str, cause: str) -> None:
        """`part` is dead and is to be started again.

        Raises:
            RunFailed: it has died too often.
        """
        self._tell(RunEvent.PART_DIED, part=part, cause=cause)
        self._since_progress[part] += 1
        deaths = self._since_progress[part]
        if deaths > self._max_restarts:
            times = "died" if deaths == 1 else f"died {deaths} times"
            since = " without a learner step in between; the last time" if self._max_restarts else ""
            raise RunFailed(f"{part} {times}{since}: {cause}")
        self.restarts[part] += 1
        _log.warning("%s died and is started again (%d of %d): %s", part, deaths, self._max_restarts, cause)

    def is_back(self, part: str) -> None:
        """`part` does its work again."""
        self._tell(RunEvent.PART_RESTARTED, part=part)
        _log.warning("%s is up again", part)


class Supervised(Generic[H]):
    """One part.

    Args:
        name: of the part, for messages and counts.
        supervision: where its deaths are counted.
        spawn: makes the handle of the n-th launch, n = 1, 2, …; returns at once.
        bring_up: makes a new handle do what the part has to do now; raises PartDied when it dies of it.
        discard: makes sure that the part behind a handle is gone. Never raises.
    """

    def __init__(
        self,
        name: str,
        supervision: Supervision,
        spawn: Callable[[int], H],
        bring_up: Callable[[H], Awaitable[None]],
        discard: Callable[[H], None],
    ) -> None:
        self.name = name
        self._supervision = supervision
        self._spawn, self._bring_up, self._discard = spawn, bring_up, discard
        self.launch = 1
        self.handle = spawn(1)
        self._launches = 1
        self._restarting: asyncio.Task[None] | None = None
        self._given_up: BaseException | None = None

    async def bring_up(self) -> None:
        """Make the first handle do what the part has to do."""
        launch = self.launch
        try:
            await self._bring_up(self.handle)
        except PartDied as death:
            await self.restart(launch, str(death))

    async def ask(self, question: Callable[[H], Awaitable[T]], on_death: OnDeath = "ask again") -> T:
        """The part's answer to `question`, which may be put more than once.

        Raises:
            PartDied: the part is dead, unless `on_death` is "ask again".
            RunFailed: it has died too often.
        """
        while True:
            if self._restarting is not None:
                await self._restarted(self._restarting)
            launch = self.launch
            try:
                return await question(self.handle)
            except PartDied as death:
                if on_death == "leave":
                    raise
                await self.restart(launch, str(death))
                if on_death == "restart":
                    raise PartDied(f"{self.name} died: {death}") from death

    async def restart(self, launch: int, cause: str) -> None:
        """The part of that launch is dead: returns when a later one has been brought up."""
        await self._replaced(launch, cause)

    async def replace(self, launch: int) -> None:
        """The part of that launch must make way for another, through no fault of its own."""
        await self._replaced(launch, None)

    async def _replaced(self, launch: int, cause: str | None) -> None:
        if launch != self.launch:
            return
        if self._given_up is not None:
            raise self._given_up
        if self._restarting is None:
            self._restarting = asyncio.create_task(self._launch_again(cause), name=f"restart of {self.name}")
            self._restarting.add_done_callback(self._settled)
        await self._restarted(self._restarting)

    async def _restarted(self, restart: asyncio.Task[None]) -> None:
        """Wait for a restart that goes on even if this waiting is cancelled."""
        await asyncio.wait({restart})
        if restart.cancelled():
            raise PartDied(f"{self.name} is dead")
        restart.result()

    def _settled(self, restart: asyncio.Task[None]) -> None:
        self._restarting = None
        if not restart.cancelled():
            self._given_up = restart.exception()

    async def _launch_again(self, cause: str | None) -> None:
        self._discard(self.handle)
        while True:
            if cause is not None:
                self._supervision.died(self.name, cause)
            self._launches += 1
            launch = self._launches
            handle = self._spawn(launch)
            try:
                await self._bring_up(handle)
            except PartDied as death:
                self._discard(handle)
                cause = str(death)
                continue
            except BaseException:
                self._discard(handle)
                raise
            self.handle, self.launch = handle, launch
            self._supervision.is_back(self.name)
            return

    async def abandon_restart(self) -> None:
        """Start nothing anew that is being started now; the part stays as dead as it is."""
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.gather(self._restarting, return_exceptions=True)

    async def close(self) -> None:
        """End the part, without asking it. It is not started again."""
        await self.abandon_restart()
        if self._given_up is None:
            self._given_up = PartDied(f"{self.name} was ended")
        self._discard(self.handle)
