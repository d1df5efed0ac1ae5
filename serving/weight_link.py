"""How a replica and the learner speak while weights go straight from the learner's GPUs to vLLM's.

::

    replica ── token, folder of the version, shards ──► learner        a connection for each transfer
    replica ◄── call(method, arguments) ── learner                     init, start, update, finish: vLLM's own names
    replica ── done, or what went wrong ──► learner
    replica ◄── over, or absent ── learner

The bytes themselves go over NCCL, between vLLM's workers and its trainer side in the learner's process. Every version
is durable in the registry before it is offered here (P8): where the learner has a newer one by now, or is gone, the
files are read. Owns the messages, lines of JSON, and their deadlines; knows neither vLLM nor NCCL.
"""

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from headrace.platform.errors import DeadlineExceeded, EngineError

_LONGEST_LINE = 64 * 1024 * 1024  # the names and shapes of all tensors
Perform = Callable[..., Awaitable[object]]
"""Calls a method of vLLM's workers by name, as `Rpc` does."""


class Wanted(msgspec.Struct, frozen=True):
    """What a replica asks for: the version whose files lie in `folder`, for so many shards."""

    token: str
    folder: str
    shards: int


class Call(msgspec.Struct, frozen=True, tag="call"):
    """A method of vLLM's workers, to be called by the replica."""

    method: str
    arguments: dict[str, Any] = {}


class Over(msgspec.Struct, frozen=True, tag="over"):
    """The transfer has ended: all is there, or the learner does not have that version (`absent`), or `error`."""

    absent: bool = False
    error: str = ""


class Done(msgspec.Struct, frozen=True):
    """A call returned; `error` where it raised."""

    error: str = ""


_encode = msgspec.json.Encoder().encode
_wanted = msgspec.json.Decoder(Wanted).decode
_told = msgspec.json.Decoder[Call | Over](Call | Over).decode
_done = msgspec.json.Decoder(Done).decode


async def fetch(
    address: tuple[str, int], token: str, folder: str, shards: int, perform: Perform, deadline_s: float
) -> bool:
    """Have the learner at `address` put the version in `folder` into the workers behind `perform`.

    Returns:
        Whether it did; False where it is not there, or does not have that version (any more). Nothing was changed then.

    Raises:
        EngineError: it failed half-way: the workers may have a mixture.
        DeadlineExceeded: it took longer than `deadline_s`; the same.
    """
    try:
        async with asyncio.timeout(deadline_s):
            reader, writer = await asyncio.open_connection(*address, limit=_LONGEST_LINE)
    except (OSError, TimeoutError):
        return False
    called = False
    try:
        async with asyncio.timeout(deadline_s):
            writer.write(_encode(Wanted(token, folder, shards)) + b"\n")
            while True:
                line = await reader.readline()
                if not line and not called:
                    return False
                told = _told(line)
                if isinstance(told, Over):
                    if told.error:
                        raise EngineError(f"the learner could not send {folder}: {told.error}")
                    return not told.absent
                called = True
                writer.write(_encode(await _performed(told, perform)) + b"\n")
    except TimeoutError as error:
        raise DeadlineExceeded(f"the weights in {folder} did not come within {deadline_s:g} s") from error
    except (OSError, msgspec.DecodeError, asyncio.IncompleteReadError) as error:
        raise EngineError(f"the learner was lost while it sent {folder}: {error}") from error
    finally:
        writer.close()


async def _performed(call: Call, perform: Perform) -> Done:
    try:
        await perform(call.method, **call.arguments)
    except Exception as error:  # the boundary to the workers: the learner has to know that they are not with it
        return Done(error=f"{type(error).__name__}: {error}")
    return Done()


Send = Callable[[int, Callable[[Call], None]], None]
"""Sends the offered weights to so many shards; blocks. It is given what performs a call at the replica, or raises."""


class WeightOffer:
    """The learner's end: the newest version, for replicas that come for it, one after the other.

    Args:
        token: what a replica must know.
        send: sends; runs in a thread.
        deadline_s: how long one transfer, and each of its calls, may take.
    """

    def __init__(self, token: str, send: Send, *, deadline_s: float) -> None:
        self._token, self._send, self._deadline_s = token, send, deadline_s
        self._folder = ""
        self._turn = asyncio.Lock()
        self._server: asyncio.Server | None = None

    async def start(self, host: str) -> tuple[str, int]:
        """Listen; returns the address."""
        self._server = await asyncio.start_server(self._serve, host, 0, limit=_LONGEST_LINE)
        name = self._server.sockets[0].getsockname()
        return str(name[0]), int(name[1])

    async def offer(self, folder: str, take_up: Callable[[], None]) -> None:
        """From now on the version in `folder` is offered; `take_up` makes it the one that `send` sends. Waits for a
        transfer that is under way."""
        async with self._turn:
            self._folder = ""
            take_up()
            self._folder = folder

    async def close(self) -> None:
        """Offer nothing any more."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(self._deadline_s):
                wanted = _wanted(await reader.readline())
            if hmac.compare_digest(wanted.token.encode(), self._token.encode()):
                writer.write(_encode(await self._transfer(wanted, reader, writer)) + b"\n")
                await writer.drain()
        except (OSError, TimeoutError, msgspec.DecodeError, ValueError):
            pass  # whoever it was has gone, or is no replica
        finally:
            writer.close()

    async def _transfer(self, wanted: Wanted, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Over:
        loop = asyncio.get_running_loop()

        async def ask(call: Call) -> Done:
            writer.write(_encode(call) + b"\n")
            return _done(await reader.readline())

        def perform(call: Call) -> None:
            done = asyncio.run_coroutine_threadsafe(ask(call), loop).result(self._deadline_s)
            if done.error:
                raise EngineError(f"{call.method}: {done.error}")

        async with self._turn:
            if wanted.folder != self._folder:
                return Over(absent=True)
            try:
                async with asyncio.timeout(self._deadline_s):
                    await asyncio.to_thread(self._send, wanted.shards, perform)
            except Exception as error:  # the boundary to NCCL: whatever it is, the replica has to know
                return Over(error=f"{type(error).__name__}: {error}")
        return Over()
