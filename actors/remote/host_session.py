"""One connection of a host: a session of the environment, played by whoever is at the other end.

The loop takes one message at a time, runs what it asks for under a deadline, and answers. It ends when the client
closes or goes away (a call that still runs is then cancelled), says nothing for too long, or the host is leaving; it
always closes the environment. A message that cannot be read, or an environment that fails, concerns this session only.
The environment is built by the first reset, in a thread and under its deadline: a constructor that blocks holds up its
own session only (case E11). Answers and logs repeat little of what was sent.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed

from headrace.actors.environments.adapter import NOWHERE, AsyncEnvironment
from headrace.actors.environments.off_loop import OffLoop
from headrace.actors.frames import described, message_of
from headrace.actors.remote.offer import Offer
from headrace.actors.remote.protocol import (
    MAX_MESSAGE,
    Code,
    Hello,
    ResetData,
    Said,
    StepData,
    decode,
    encode,
    fault_of,
    news_of,
)
from headrace.actors.text import well_formed
from headrace.platform.errors import ConfigError, DeadlineExceeded, EnvironmentFault
from headrace.platform.records.message import Message, Observation, StepResult, Task, ToolCall, ToolSpec
from headrace.platform.records.status import Role

T = TypeVar("T")
_log = logging.getLogger(__name__)
_CLOSE_S = 10.0
_MOST_REPEATED = 400
_GOING_AWAY = 1001
_TRY_AGAIN = 1013


class _Wrong(Exception):
    """The client sent what cannot be done; `code` says how it is wrong."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text[:_MOST_REPEATED])
        self.code = code


class _Gone(Exception):
    """The client went away while the environment was busy for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionLimits:
    """Seconds: how long a client may say nothing, and how long one call may take where it does not say."""

    idle_s: float = 300.0
    call_s: float = 300.0


class HostSession:
    """Plays one session over `connection`.

    Args:
        connection: open, and accepted by the host.
        offer: makes the environment.
        hello: what the host says of itself.
        limits: see `SessionLimits`.
        session_id: tells the sessions of a host apart.
    """

    def __init__(
        self, connection: ServerConnection, offer: Offer, hello: Hello, limits: SessionLimits, session_id: str
    ) -> None:
        self._connection, self._offer, self._hello, self._limits = connection, offer, hello, limits
        self._id = session_id
        self._off_loop = OffLoop(offer.threads)
        self._building: asyncio.Future[AsyncEnvironment] | None = None
        self._told = NOWHERE
        self._steps = 0
        self._episodes = 0
        self.is_playing = False
        self.is_draining = False

    async def play(self) -> None:
        """The whole session."""
        try:
            while not (self.is_draining and not self.is_playing):
                said = await self._next()
                if said is None or said.type == "close":
                    return
                await self._answer(said)
            await self.leave(Code.DRAINING)
        except (ConnectionClosed, _Gone):
            return
        finally:
            self.is_playing = False
            await self._let_go()

    async def leave(self, code: Code) -> None:
        """Tell the client that the session is over, and end it; what it waits for is cancelled."""
        texts = {
            Code.DRAINING: "the host is draining and begins nothing new",
            Code.CANCELLED: "the host was drained before the episode ended",
            Code.IDLE: f"nothing was said for {self._limits.idle_s:g} s",
        }
        await refuse(self._connection, code, texts[code], _GOING_AWAY)

    async def _next(self) -> Said | None:
        """The next message that can be read; None after the client was told that it was silent for too long."""
        while True:
            try:
                async with asyncio.timeout(self._limits.idle_s):
                    raw = await self._connection.recv(decode=False)
            except TimeoutError:
                await self.leave(Code.IDLE)
                return None
            try:
                return decode(raw)
            except ValueError as error:
                told = f"no message: {error}"[:_MOST_REPEATED]
                await self._send("error", {"message": told, "code": _broken(raw)})

    async def _answer(self, said: Said) -> None:
        try:
            match said.type:
                case "hello":
                    await self._send("hello", self._hello)
                case "reset":
                    await self._reset(said.data)
                case "step":
                    await self._step(said.data)
                case "state":
                    played = f"{self._id}-{self._episodes}" if self._episodes else None
                    await self._send("state", {"episode_id": played, "step_count": self._steps})
                case _:
                    raise _Wrong(Code.UNKNOWN_TYPE, f"no message is of type {said.type!r:.80}")
        except _Wrong as error:
            await self._send("error", {"message": str(error), "code": error.code})
        except (ConnectionClosed, _Gone):
            raise
        except (Exception, SystemExit) as error:  # the boundary: the client judges whose fault it is
            fault = fault_of(error)
            data = {"message": fault.text, "code": Code.EXECUTION_ERROR, "fault": fault}
            await self._send("error", data)
            if isinstance(error, DeadlineExceeded):  # what still runs must not meet the next call
                await self._connection.close(_GOING_AWAY, "a call outran its deadline")

    async def _reset(self, data: dict[str, Any]) -> None:
        if self.is_draining:  # whoever holds a connection without an episode finds another host
            self.is_playing = False
            return
        is_plain = "task" not in data
        if is_plain:
            task, seed = await self._numbered(data.get("seed"))
            deadline_s = 0.0
        else:
            asked = _converted(data, ResetData)
            task, seed, deadline_s = asked.task, asked.seed, asked.deadline_s
        self.is_playing, self._steps = True, 0
        self._episodes += 1
        has_begun = False
        try:
            environment, observation, tools = await self._call("reset", self._begun(task, seed), deadline_s)
            await self._observed(observation, environment, is_plain, tools)
            has_begun = True
        finally:
            self.is_playing = has_begun  # a drain does not wait for an episode that did not begin

    async def _begun(self, task: Task, seed: int) -> tuple[AsyncEnvironment, Observation, Sequence[ToolSpec]]:
        """The environment after its reset, what it showed, and its tools."""
        if self._building is None:
            self._building = asyncio.ensure_future(_guarded(self._off_loop.call(self._offer.session)))
        environment = await asyncio.shield(self._building)  # whoever stops waiting leaves it to `_let_go`
        observation = await environment.reset(task, seed)
        return environment, observation, await self._off_loop.call(environment.tools)

    async def _step(self, data: dict[str, Any]) -> None:
        is_plain = "key" not in data
        if is_plain:
            message, key, deadline_s = _plain_message(data), f"plain/{self._episodes}/{self._steps}", 0.0
        else:
            asked = _converted(data, StepData)
            message, key, deadline_s = asked.message, asked.key, asked.deadline_s
        if self._building is None:
            raise EnvironmentFault(f"{self._hello.environment}: step before reset", transient=False)
        environment = await self._building
        result = await self._call("step", environment.step(message, key), deadline_s)
        self._steps += 1
        self.is_playing = self.is_playing and not (result.terminated or result.truncated)
        await self._observed(result, environment, is_plain)

    async def _numbered(self, number: Any) -> tuple[Task, int]:
        """The task of a client that knows none, by its number."""
        if number is None:
            number = self._episodes
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise _Wrong(Code.VALIDATION_ERROR, f"seed is the number of a task, from 0, not {number!r:.80}")
        try:
            return await self._call("reset", self._off_loop.call(self._offer.task, number), 0.0)
        except ConfigError as error:
            raise _Wrong(Code.VALIDATION_ERROR, str(error)) from None

    async def _call(self, what: str, call: Coroutine[Any, Any, T], deadline_s: float) -> T:
        """What the environment answers; cancelled at its deadline, and when the client goes away."""
        seconds = deadline_s if deadline_s > 0 else self._limits.call_s
        running = asyncio.ensure_future(_guarded(call))
        gone = asyncio.ensure_future(self._connection.wait_closed())
        try:
            await asyncio.wait({running, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if running.cancelled():
                raise EnvironmentFault(f"its {what} cancelled itself", transient=False)
            if running.done():
                return running.result()
            if gone.done():
                raise _Gone
            raise DeadlineExceeded(f"a {what} took longer than {seconds:.3g} s")
        finally:
            running.cancel()
            gone.cancel()
            await asyncio.wait({running, gone}, timeout=_CLOSE_S)

    async def _observed(
        self,
        answer: Observation | StepResult,
        environment: AsyncEnvironment,
        is_plain: bool,
        tools: Sequence[ToolSpec] = (),
    ) -> None:
        answer = msgspec.structs.replace(answer, messages=tuple(well_formed(answer.messages)))
        observation: Any = answer
        reward, done = None, False
        if isinstance(answer, StepResult):
            values = [each.value for each in answer.rewards if each.valid and each.kind.is_reward]
            reward, done = (sum(values) if values else None), answer.terminated or answer.truncated
        if is_plain:
            text = "\n".join(message.content for message in answer.messages)
            observation = {**msgspec.to_builtins(answer), "text": text}
        data: dict[str, Any] = {"observation": observation, "reward": reward, "done": done}
        if isinstance(answer, Observation) and not is_plain:
            data["tools"] = tuple(tools)
        provenance = environment.provenance
        news = news_of(provenance, self._told)
        if news is not None and not is_plain:
            data["provenance"], self._told = news, provenance
        await self._send("observation", data)

    async def _send(self, kind: str, data: Any) -> None:
        sent = encode({"type": kind, "data": data})
        if len(sent) > MAX_MESSAGE:
            raise ValueError(f"an answer of {len(sent)} bytes; at most {MAX_MESSAGE} can be sent")
        await self._connection.send(sent, text=True)

    async def _let_go(self) -> None:
        """Close the environment, or leave that to a task where it is still being built and takes its time."""
        if self._building is None:
            return
        closing = asyncio.ensure_future(self._closed(self._building))
        _closing.add(closing)
        closing.add_done_callback(_closing.discard)
        done, _ = await asyncio.wait({closing}, timeout=_CLOSE_S)
        if not done:
            _log.warning("session %s is not closed within %g s", self._id, _CLOSE_S)

    async def _closed(self, building: asyncio.Future[AsyncEnvironment]) -> None:
        try:
            await (await building).close()
        except (Exception, SystemExit) as error:
            told = f"{type(error).__name__}: {message_of(error)}"[:_MOST_REPEATED]
            _log.warning("session %s is not closed: %s", self._id, told)


_closing: set[asyncio.Future[None]] = set()
"""What ends after its session; the event loop alone would forget it."""


async def _guarded(call: Coroutine[Any, Any, T]) -> T:
    """A task that raises SystemExit ends the event loop, and with it every other session."""
    try:
        return await call
    except SystemExit as error:
        raise EnvironmentFault(described(error), transient=False) from error


async def refuse(connection: ServerConnection, code: Code, text: str, close_code: int = _TRY_AGAIN) -> None:
    """Tell a client why it is left alone, as an error and as the reason of the closing."""
    with contextlib.suppress(ConnectionClosed):
        await connection.send(encode({"type": "error", "data": {"message": text, "code": code}}), text=True)
    await connection.close(close_code, f"{code}: {text}"[:100])


def _broken(raw: bytes | str) -> Code:
    """How a message that could not be read is wrong."""
    try:
        json.loads(raw)
    except (ValueError, RecursionError):
        return Code.INVALID_JSON
    return Code.VALIDATION_ERROR


def _converted(data: dict[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise _Wrong(Code.VALIDATION_ERROR, str(error)) from None


def _plain_message(data: dict[str, Any]) -> Message:
    """The assistant's message of a client that does not know ours: words, or one tool call."""
    tool, arguments, words = data.get("tool", ""), data.get("arguments", {}), data.get("message", "")
    if unknown := data.keys() - {"tool", "arguments", "message", "metadata"}:
        raise _Wrong(Code.VALIDATION_ERROR, f"a step has no {', '.join(sorted(unknown))}; {_USAGE}")
    if not (isinstance(tool, str) and isinstance(arguments, dict) and isinstance(words, str)):
        raise _Wrong(Code.VALIDATION_ERROR, _USAGE)
    if not ("message" in data or tool):
        raise _Wrong(Code.VALIDATION_ERROR, _USAGE)
    calls = (ToolCall(name=tool, arguments=arguments, call_id="call-0"),) if tool else ()
    return Message(Role.ASSISTANT, words, tool_calls=calls)


_USAGE = 'say {"message": TEXT}, or {"tool": NAME, "arguments": {…}}'
