"""A session that another process plays.

`PooledSession` finds a host, begins there, and keeps to it: as long as no reset was taken on, a host that refuses or
fails is left for another one; from then on a lost host ends the session with HostAway, and a new attempt is played
elsewhere. Every wait has an end (case X8), and whoever is cancelled leaves no connection behind (case X4).
`RemoteEnvironment` says headrace's messages, `openenv.py` those of stock OpenEnv servers.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import msgspec

from headrace.actors.remote.group_version import GroupVersion
from headrace.actors.remote.known_hosts import KnownHost
from headrace.actors.remote.link import Link
from headrace.actors.remote.protocol import (
    MOST_TEXT,
    Code,
    Fault,
    Hello,
    ResetData,
    Said,
    StepData,
    error_of,
    with_news,
)
from headrace.platform.errors import EnvironmentFault, HostAway
from headrace.platform.records.episode import Provenance
from headrace.platform.records.message import Message, Observation, StepResult, Task, ToolSpec

if TYPE_CHECKING:
    from headrace.actors.remote.pools import EnvironmentPool

T = TypeVar("T")
# How much longer than the host the client waits: the host's own words about a deadline are the better ones.
_MARGIN_S = 1.0


class Refused(Exception):
    """A host does not begin; nothing has happened, so another one may be asked."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(slots=True, kw_only=True)
class Place:
    """Where a session is played."""

    host: KnownHost
    link: Link
    hello: Hello


class PooledSession(ABC):
    """One session. Made by `EnvironmentPool.session`.

    Args:
        pool: finds hosts.
        group: the version that all sessions of a group are played in (P17).
        begin_s: how long `reset` may take, finding a host included.
        step_s: how long a step may take; whoever plays may have a shorter deadline of its own.
    """

    def __init__(self, pool: "EnvironmentPool", group: GroupVersion, begin_s: float, step_s: float) -> None:
        self._pool, self._group = pool, group
        self._begin_s, self._step_s = begin_s, step_s
        self._place: Place | None = None
        self._has_closed = False
        self.name, self.version = pool.environment, ""
        self.provenance = Provenance()

    @abstractmethod
    async def _begin(self, place: Place, task: Task, seed: int, seconds: float) -> Observation:
        """Reset on a host. Raises Refused where it does not take the session."""

    @abstractmethod
    async def _act(self, place: Place, message: Message, key: str, seconds: float) -> StepResult:
        """Step on the host."""

    @abstractmethod
    def tools(self) -> Sequence[ToolSpec]:
        """See `Environment.tools`; known after `reset`."""

    async def reset(self, task: Task, seed: int) -> Observation:
        """See `Environment.reset`.

        Raises:
            HostAway: no host could take it in time, or the one that did is gone.
            DeadlineExceeded: the host did not answer.
            EnvironmentFault: as the environment raised it.
        """
        if self._has_closed:
            raise EnvironmentFault(f"{self.name}: reset after close", transient=False)
        if self._place is not None:  # a second reset keeps its host
            return await self._heard(self._place, self._begin(self._place, task, seed, self._begin_s + _MARGIN_S))
        loop = asyncio.get_running_loop()
        ends = loop.time() + self._begin_s
        while True:
            place = await self._pool.place(self._group, ends)
            self._place = place
            self.name, self.version = place.hello.environment, place.hello.version
            self.provenance = Provenance(pool=place.host.address, image_digest=place.hello.image_digest)
            try:
                observation = await self._begin(place, task, seed, max(ends - loop.time(), 0) + _MARGIN_S)
            except Refused as refusal:
                self._group.given_up()
                self._pool.refused(place, refusal.code, str(refusal))
                await self._leave()
            except BaseException as error:
                self._group.given_up()
                if isinstance(error, HostAway):
                    self._pool.lost(place, str(error))
                raise
            else:
                self._group.begun()
                return observation

    async def step(self, message: Message, key: str) -> StepResult:
        """See `Environment.step`. Raises as `reset`."""
        if self._place is None:
            when = "after close" if self._has_closed else "before reset"
            raise EnvironmentFault(f"{self.name}: step {when}", transient=False)
        return await self._heard(self._place, self._act(self._place, message, key, self._step_s + _MARGIN_S))

    async def close(self) -> None:
        """See `Environment.close`."""
        self._has_closed = True
        await self._leave()

    async def _heard(self, place: Place, answer: Awaitable[T]) -> T:
        """What the host answers; the pool learns when it is gone."""
        try:
            return await answer
        except Refused as refusal:
            self._pool.refused(place, refusal.code, str(refusal))
            raise HostAway(f"{place.host.address}: {refusal}") from None
        except HostAway as error:
            self._pool.lost(place, str(error))
            raise

    async def _leave(self) -> None:
        place, self._place = self._place, None
        if place is not None:
            await self._pool.release(place)


class RemoteEnvironment(PooledSession):
    """A session on a host of headrace's."""

    _tools: tuple[ToolSpec, ...] = ()

    def tools(self) -> Sequence[ToolSpec]:
        """See `Environment.tools`; known after `reset`."""
        return self._tools

    async def _begin(self, place: Place, task: Task, seed: int, seconds: float) -> Observation:
        data = ResetData(task=task, seed=seed, deadline_s=max(seconds - _MARGIN_S, 0.001))
        said = await place.link.ask("reset", data, seconds)
        observed = self._understood(said, place, Observation)
        self._tools = converted(said.data.get("tools", ()), tuple[ToolSpec, ...], place.link.address)
        return observed

    async def _act(self, place: Place, message: Message, key: str, seconds: float) -> StepResult:
        data = StepData(message=message, key=key, deadline_s=max(seconds - _MARGIN_S, 0.001))
        return self._understood(await place.link.ask("step", data, seconds), place, StepResult)

    def _understood(self, said: Said, place: Place, kind: type[T]) -> T:
        address = place.link.address
        if said.type != "observation":
            raise_error(said, address)
        if "provenance" in said.data:
            told = converted(said.data["provenance"], Provenance, address)
            told = with_news(self.provenance, told)
            digest = told.image_digest or place.hello.image_digest
            self.provenance = msgspec.structs.replace(told, pool=address, image_digest=digest)
        return converted(said.data.get("observation"), kind, address)


async def greet(link: Link, seconds: float) -> Hello:
    """Ask a host of headrace's who it is.

    Raises:
        Refused: it is full or draining.
        HostAway: it is gone, or speaks otherwise.
        DeadlineExceeded: it does not answer.
    """
    said = await link.ask("hello", {}, seconds)
    if said.type != "hello":
        if said.data.get("code") == Code.UNKNOWN_TYPE:
            raise HostAway(f"{link.address} is no host of headrace's; give the pool `protocol: openenv`")
        raise_error(said, link.address)
    return converted(said.data, Hello, link.address)


def raise_error(said: Said, address: str) -> NoReturn:
    """Raise what an error of a host means."""
    data = said.data
    if said.type != "error":
        raise HostAway(f"{address} answered {said.type!r:.80}, which was not asked for")
    text = str(data.get("message", "an error without words"))[:MOST_TEXT]
    if "fault" in data:
        raise error_of(converted(data["fault"], Fault, address))
    code = data.get("code")
    known = Code(code) if isinstance(code, str) and code in list(Code) else None
    if known is not None and known.refuses:
        raise Refused(known, text)
    if known is not None and known.ends:
        raise HostAway(f"{address}: {text}")
    raise EnvironmentFault(f"{address}: {text} ({code!s:.80})", transient=False)


def converted(value: Any, kind: type[T], address: str) -> T:
    """A part of an answer as a record. Raises HostAway for another form."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise HostAway(f"{address} speaks otherwise: {error!s:.200}") from None
