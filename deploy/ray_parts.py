"""Parts as Ray actors, and Ray's own failures by headrace's names.

Ray restarts nothing here (`max_restarts=0`): a part must be built again, and only its runtime knows how. The n-th
launch of a part is the actor NAME-n (the first is NAME), as Ray keeps a dead actor's name for a while.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, TypeVar

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayError, RayTaskError

from headrace.deploy.supervision import OnDeath, Supervised, Supervision
from headrace.platform.errors import DeadlineExceeded, HeadraceError, PartDied, RunFailed

T = TypeVar("T")
CONTROL_DEADLINE_S = 60.0
"""How long a part may take to answer a control call, unless the call itself takes longer."""
_CAUSE_LENGTH = 240
_log = logging.getLogger(__name__)


class RayPart:
    """One part, started again when it dies.

    Args:
        name: of the part and of its first actor.
        actor: the actor's class.
        namespace: of the actors.
        supervision: counts deaths.
        bring_up: makes a new actor do what the part has to do now.
        place_deadline_s: how long a later launch may wait for a node that has room for it (P23).
        options: what it needs, and where it may go (`Placement.options`).
        control_deadline_s: how long a part that says nothing is believed to be alive.
    """

    def __init__(
        self,
        name: str,
        actor: Any,
        namespace: str,
        supervision: Supervision,
        bring_up: Callable[[Any], Awaitable[None]],
        place_deadline_s: float,
        options: Mapping[str, Any],
        control_deadline_s: float = CONTROL_DEADLINE_S,
    ) -> None:
        async def placed_and_brought_up(handle: Any) -> None:
            await placed(name, handle, place_deadline_s)
            await bring_up(handle)

        def spawn(launch: int) -> Any:
            own = name if launch == 1 else f"{name}-{launch}"
            return actor.options(name=own, namespace=namespace, max_concurrency=16, max_restarts=0, **options).remote()

        self.name = name
        self._control_deadline_s = control_deadline_s
        self._supervised = Supervised(name, supervision, spawn, placed_and_brought_up, end_actor)

    @property
    def launch(self) -> int:
        """Which launch is up: 1, 2, …"""
        return self._supervised.launch

    async def bring_up(self) -> None:
        """See `Supervised.bring_up`."""
        await self._supervised.bring_up()

    async def ask(
        self,
        what: str,
        call: Callable[[Any], Awaitable[T]],
        deadline_s: float | None = None,
        on_death: OnDeath = "ask again",
    ) -> T:
        """The answer of the actor to `call`; `what` it is for messages. One that does not answer in time is as good as
        dead; `deadline_s` is for calls that take longer than others. See `Supervised.ask`."""
        within_s = self._control_deadline_s if deadline_s is None else deadline_s

        async def question(handle: Any) -> T:
            try:
                return await answer(f"{what} ({self.name})", call(handle), within_s)
            except NoAnswer as error:
                raise PartDied(f"{error}: no answer within {within_s:g} s") from error

        return await self._supervised.ask(question, on_death)

    async def ask_now(self, what: str, call: Callable[[Any], Awaitable[T]]) -> T:
        """The answer of the present actor, dead or alive: nobody waits for a restart, and none is begun.

        Raises:
            PartDied: it is dead.
        """
        return await answer(f"{what} ({self.name})", call(self._supervised.handle), self._control_deadline_s)

    async def replace(self, launch: int) -> None:
        """See `Supervised.replace`."""
        await self._supervised.replace(launch)

    async def restart(self, launch: int, cause: str) -> None:
        """See `Supervised.restart`."""
        await self._supervised.restart(launch, cause)

    async def abandon_restart(self) -> None:
        """See `Supervised.abandon_restart`."""
        await self._supervised.abandon_restart()

    async def close(self) -> None:
        """End the actor."""
        await self._supervised.close()


def end_actor(handle: Any) -> None:
    """Make sure that an actor is gone, wherever it runs."""
    try:
        ray.kill(handle)
    except (RayError, ValueError) as error:
        _log.info("an actor could not be killed: %s", error)


async def placed(name: str, handle: Any, deadline_s: float) -> None:
    """Wait until Ray has put an actor on a node (P23).

    Raises:
        DeadlineExceeded: no node has room for it.
    """
    try:
        await answer(f"placing {name}", handle.__ray_ready__.remote(), deadline_s)
    except DeadlineExceeded:
        there = ray.cluster_resources().get("CPU", 0.0)  # type: ignore[no-untyped-call]
        raise DeadlineExceeded(
            f"no node had a free CPU for {name} within {deadline_s:g} s: the Ray cluster has {there:g} CPUs left"
        ) from None


class NoAnswer(DeadlineExceeded):
    """Ray has not answered in time, as apart from an actor that answered with a DeadlineExceeded of its own."""


async def answer(what: str, reference: Awaitable[T], deadline_s: float = CONTROL_DEADLINE_S) -> T:
    """What Ray answers, its errors as headrace's."""
    with _named(what):
        async with asyncio.timeout(deadline_s):
            return await reference


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    try:
        yield
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, HeadraceError):
            raise cause from None
        raise RunFailed(f"{what}: {cause}") from error
    except (RayActorError, ObjectLostError) as error:
        raise PartDied(_in_short(error)) from error
    except TimeoutError as error:
        if isinstance(error, HeadraceError):
            raise
        raise NoAnswer(f"{what} took too long") from None


def _in_short(error: RayError) -> str:
    """Ray's reason on one line, without the advice that follows it."""
    text = " ".join(str(error).split())
    for beginning in ("The actor is dead because ", "The actor died because "):
        text = text.partition(beginning)[2] or text
    text = text.partition(" Some common causes include")[0]
    return text if len(text) <= _CAUSE_LENGTH else f"{text[:_CAUSE_LENGTH]}…"
