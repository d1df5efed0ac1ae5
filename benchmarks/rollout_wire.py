"""What the way to an engine costs: CPU per turn, client plus server, against a bare asyncio frame echo.

Each system runs its server in a child process and its client here; `open_requests` workers send one request after the
other, as episodes do. The CPU time of both processes (user and system) over the turns is the figure. Every request is
about 860 bytes (200 token ids), every reply about 590 (64 token ids and logprobs). Systems take turns, repetition by
repetition; a row is the median, with the smallest and largest.

- `pool`: the product. Router and pool, then the door: GenerationRequest and Generation records in and out, session
  affinity, deadlines, cancellation, results kept until acknowledged, version spans, an engine that answers at once, a
  task per request on the server, as for any engine.
- `door`: the same without router and pool, a client alone.
- `frame echo`: the floor. One connection, a frame per request (u32 length, u32 number, opaque bytes), a future per
  number. No records, no codec, no deadlines, no tasks on the server. Its writes are gathered into one per turn of the
  loop, as the door's are: that makes the floor two to three times lower, and the target harder. The door also puts
  several messages into one frame, which the floor does not.
- `frame echo, a write per frame`: the same without gathering, msgpack of (number, bytes); for comparison only.
- `raw asyncio HTTP`, `aiohttp`: one keep-alive connection per open request, at most 256, opaque bytes both ways,
  against the same raw asyncio HTTP server.

Requests are built before the clock starts: making them is the episode's cost, not the way's. It holds when `pool` costs
at most `TARGET` times the floor, and from 64 to 4,096 open requests at most `GROWTH_TARGET` times as much per turn.
"""

import argparse
import asyncio
import contextlib
import importlib.util
import os
import platform
import signal
import statistics
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from importlib.metadata import version
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
from common import Row, absent, cpu_s, result, row_of, table

from headrace import __version__
from headrace.actors.tuning import tune_collector
from headrace.platform.records import (
    FinishReason,
    Generation,
    GenerationRequest,
    SamplingParams,
    VersionRef,
    VersionSpan,
    i32,
)
from headrace.serving.door.client import DoorClient
from headrace.serving.door.server import DoorServer
from headrace.serving.pool import Pool

TARGET = 4.0
GROWTH_TARGET = 1.3
OPEN_REQUESTS = (64, 4096)
HTTP_CONNECTIONS = 256
UNIT = "us CPU per turn"
TOKEN = "benchmark"
VERSION = 7
PROMPT_TOKENS, REPLY_TOKENS = 200, 64

Ask = Callable[[int], Awaitable[object]]


def a_request(number: int) -> GenerationRequest:
    """Request of worker `number`."""
    return GenerationRequest(
        key=f"bench/{number}/0/3/0",
        session=f"bench/{number}/0",
        token_ids=i32(list(range(PROMPT_TOKENS))),
        version=VERSION,
        seed=1_000_000_007 + number,
        sampling=SamplingParams(max_new_tokens=REPLY_TOKENS),
    )


def a_generation() -> Generation:
    """What the instant engine answers."""
    return Generation(
        token_ids=i32(list(range(REPLY_TOKENS))),
        logprobs=np.full(REPLY_TOKENS, -0.5, np.float32),
        finish_reason=FinishReason.STOP,
        version_spans=(VersionSpan(VersionRef("bench", VERSION), 0, REPLY_TOKENS),),
        replica="replica-0",
        engine_build="instant",
    )


class InstantEngine:
    """A TokenGenerator that answers at once."""

    def __init__(self) -> None:
        self._generation = a_generation()

    async def generate(self, request: GenerationRequest) -> Generation:
        """The same generation, whatever is asked."""
        return self._generation

    async def release(self, session: str) -> None:
        """Nothing is kept."""

    def versions(self) -> tuple[int, ...]:
        """One version."""
        return (VERSION,)


# --- the floor: a bare frame echo -------------------------------------------------------------------------------------

REQUEST_BYTES, REPLY_BYTES = 860, 590
_HEADER = struct.Struct("<II")


class Echo(asyncio.Protocol):
    """Both ends of the floor: length, number, bytes; one gathered write per turn of the loop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.rest = b""
        self.out: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is up."""
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Cut the stream."""
        if self.rest:
            data = self.rest + data
        start, end = 0, len(data)
        while end - start >= 8:
            length, number = _HEADER.unpack_from(data, start)
            if end - start - 8 < length:
                break
            self.frame(number, data[start + 8 : start + 8 + length])
            start += 8 + length
        self.rest = data[start:]

    def frame(self, number: int, body: bytes) -> None:
        """Handle one frame."""
        raise NotImplementedError

    def write(self, number: int, body: bytes) -> None:
        """Send one frame."""
        if not self.out:
            self.loop.call_soon(self.flush)
        self.out.append(_HEADER.pack(len(body), number))
        self.out.append(body)

    def flush(self) -> None:
        """Send what this turn of the loop gathered."""
        self.transport.write(b"".join(self.out))
        self.out.clear()


class EchoServer(Echo):
    """Answers each frame at once."""

    reply = bytes(REPLY_BYTES)

    def frame(self, number: int, body: bytes) -> None:
        """Handle one frame."""
        self.write(number, self.reply)


class EchoClient(Echo):
    """A future per number."""

    request = bytes(REQUEST_BYTES)

    def __init__(self) -> None:
        super().__init__()
        self.open: dict[int, asyncio.Future[bytes]] = {}
        self.number = 0

    def frame(self, number: int, body: bytes) -> None:
        """Handle one frame."""
        self.open.pop(number).set_result(body)

    def call(self, worker: int) -> asyncio.Future[bytes]:
        """Ask; the future is the reply."""
        self.number += 1
        future = self.open[self.number] = self.loop.create_future()
        self.write(self.number, self.request)
        return future


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(tuple[int, bytes]).decode


class PlainEcho(Echo):
    """The same with msgpack of (number, bytes) and a write per frame."""

    def data_received(self, data: bytes) -> None:
        """Cut the stream."""
        if self.rest:
            data = self.rest + data
        start, end = 0, len(data)
        while end - start >= 4:
            length = int.from_bytes(data[start : start + 4], "little")
            if end - start - 4 < length:
                break
            self.frame(*_unpack(data[start + 4 : start + 4 + length]))
            start += 4 + length
        self.rest = data[start:]

    def write(self, number: int, body: bytes) -> None:
        """Send one frame."""
        frame = _pack((number, body))
        self.transport.write(len(frame).to_bytes(4, "little") + frame)


class PlainEchoServer(PlainEcho, EchoServer):
    """Server of the comparison row."""


class PlainEchoClient(PlainEcho, EchoClient):
    """Client of the comparison row."""


# --- HTTP -------------------------------------------------------------------------------------------------------------

_END = b"\r\n\r\n"


class Http(asyncio.Protocol):
    """Cuts keep-alive HTTP messages with a content-length out of the stream."""

    def __init__(self) -> None:
        self.rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is up."""
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Cut the stream."""
        data = self.rest + data if self.rest else data
        while (head := data.find(_END)) >= 0:
            lowered = data[:head].lower()
            at = lowered.index(b"content-length:") + 15
            stop = lowered.find(b"\r\n", at)
            end = head + 4 + int(lowered[at : stop if stop >= 0 else head])
            if len(data) < end:
                break
            body, data = data[head + 4 : end], data[end:]
            self.message(body)
        self.rest = data

    def message(self, body: bytes) -> None:
        """Handle one message."""
        raise NotImplementedError


class HttpServer(Http):
    """Answers each request at once."""

    reply = (
        b"HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\ncontent-length: %d\r\n\r\n" % REPLY_BYTES
        + bytes(REPLY_BYTES)
    )

    def message(self, body: bytes) -> None:
        """Handle one message."""
        self.transport.write(self.reply)


class HttpClient(Http):
    """One request at a time."""

    head = b"POST /generate HTTP/1.1\r\nhost: door\r\ncontent-length: %d\r\n\r\n" % REQUEST_BYTES

    def message(self, body: bytes) -> None:
        """Handle one message."""
        self.future.set_result(body)

    def call(self) -> asyncio.Future[bytes]:
        """Ask; the future is the reply."""
        self.future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.transport.write(self.head + bytes(REQUEST_BYTES))
        return self.future


class HttpPool:
    """Keep-alive connections, as many as requests are open, up to a bound."""

    def __init__(self, port: int, connections: int) -> None:
        self.port = port
        self.free: list[HttpClient] = []
        self.permits = asyncio.Semaphore(connections)

    async def call(self, worker: int) -> bytes:
        """Ask on a free connection."""
        async with self.permits:
            if self.free:
                client = self.free.pop()
            else:
                loop = asyncio.get_running_loop()
                _, client = await loop.create_connection(HttpClient, "127.0.0.1", self.port)
            body = await client.call()
            self.free.append(client)
            return body

    def close(self) -> None:
        """End it."""
        for client in self.free:
            client.transport.close()


# --- servers in a child process ---------------------------------------------------------------------------------------

_PROTOCOLS: dict[str, Callable[[], asyncio.Protocol]] = {
    "frame echo": EchoServer,
    "frame echo, a write per frame": PlainEchoServer,
    "raw asyncio HTTP": HttpServer,
}


async def serve(system: str) -> None:
    """Serve until stdin ends; each line on stdin is answered with this process's CPU seconds."""
    loop = asyncio.get_running_loop()
    if system == "door":
        server = DoorServer(InstantEngine(), TOKEN, "replica-0")
        _, port = await server.start()
    else:
        listener = await loop.create_server(_PROTOCOLS[system], "127.0.0.1", 0, backlog=1024)
        port = listener.sockets[0].getsockname()[1]
    print(port, flush=True)
    ended = asyncio.Event()

    def line() -> None:
        if sys.stdin.readline():
            print(cpu_s(), flush=True)
        else:
            ended.set()

    loop.add_reader(sys.stdin.fileno(), line)
    await ended.wait()


class Child:
    """A server process and its CPU clock."""

    def __init__(self, system: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), "--serve", system],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.port = int(self._line())

    def cpu_s(self) -> float:
        """CPU seconds of the child so far."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        return float(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()


# --- clients ----------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def door(port: int, open_requests: int) -> AsyncIterator[Ask]:
    client = await DoorClient.connect("127.0.0.1", port, TOKEN)
    requests = [a_request(number) for number in range(open_requests)]
    try:
        yield lambda worker: client.generate(requests[worker])
    finally:
        await client.close()


@contextlib.asynccontextmanager
async def pool(port: int, open_requests: int) -> AsyncIterator[Ask]:
    members = Pool()
    members.add(await DoorClient.connect("127.0.0.1", port, TOKEN))
    requests = [a_request(number) for number in range(open_requests)]
    try:
        yield lambda worker: members.generate(requests[worker])
    finally:
        await members.close()


@contextlib.asynccontextmanager
async def echo(port: int, open_requests: int, client_class: type[EchoClient] = EchoClient) -> AsyncIterator[Ask]:
    loop = asyncio.get_running_loop()
    transport, client = await loop.create_connection(client_class, "127.0.0.1", port)
    try:
        yield client.call
    finally:
        transport.close()


@contextlib.asynccontextmanager
async def http(port: int, open_requests: int) -> AsyncIterator[Ask]:
    pool = HttpPool(port, min(open_requests, HTTP_CONNECTIONS))
    try:
        yield pool.call
    finally:
        pool.close()


@contextlib.asynccontextmanager
async def aiohttp_client(port: int, open_requests: int) -> AsyncIterator[Ask]:
    import aiohttp

    body = bytes(REQUEST_BYTES)
    connector = aiohttp.TCPConnector(limit=min(open_requests, HTTP_CONNECTIONS))
    async with aiohttp.ClientSession(connector=connector) as session:

        async def call(worker: int) -> bytes:
            async with session.post(f"http://127.0.0.1:{port}/generate", data=body) as reply:
                return await reply.read()

        yield call


SYSTEMS: dict[str, tuple[str, Callable[[int, int], AbstractAsyncContextManager[Ask]]]] = {
    "pool": ("door", pool),
    "door": ("door", door),
    "frame echo": ("frame echo", echo),
    "frame echo, a write per frame": (
        "frame echo, a write per frame",
        lambda port, n: echo(port, n, PlainEchoClient),
    ),
    "raw asyncio HTTP": ("raw asyncio HTTP", http),
    "aiohttp": ("raw asyncio HTTP", aiohttp_client),
}
_LIGHT = ("pool", "door", "frame echo", "frame echo, a write per frame")


async def drive(ask: Ask, open_requests: int, turns: int) -> int:
    """`open_requests` workers, each one turn after the other; returns how many turns were made."""
    each = max(1, turns // open_requests)

    async def worker(number: int) -> None:
        for _ in range(each):
            await ask(number)

    await asyncio.gather(*(worker(number) for number in range(open_requests)))
    return each * open_requests


async def measure(system: str, child: Child, open_requests: int, turns: int) -> float:
    """CPU us per turn of both processes, after a short warm-up on the same connection."""
    async with SYSTEMS[system][1](child.port, open_requests) as ask:
        await drive(ask, open_requests, min(turns, open_requests))
        server, client = child.cpu_s(), cpu_s()
        made = await drive(ask, open_requests, turns)
        spent = (cpu_s() - client) + (child.cpu_s() - server)
    return spent / made * 1e6


def versions() -> dict[str, str]:
    """Version of each system; the bare ones are asyncio's, that is Python's."""
    bare = f"Python {platform.python_version()}"
    found = dict.fromkeys(SYSTEMS, bare)
    found["pool"] = found["door"] = f"headrace {__version__}"
    if importlib.util.find_spec("aiohttp") is None:
        del found["aiohttp"]
    else:
        found["aiohttp"] = version("aiohttp")
    return found


def links(system: str, open_requests: int) -> int:
    """Connections that a system uses."""
    return 1 if system in _LIGHT else min(open_requests, HTTP_CONNECTIONS)


def run(repeats: int, turns: int, http_turns: int) -> tuple[list[Row], dict[int, float], float]:
    """All systems, interleaved; the rows, the ratio of pool and floor by open requests, and how much more a turn of the
    pool costs at the most open requests than at the fewest."""
    known = versions()
    children = {server: Child(server) for server in {SYSTEMS[system][0] for system in known}}
    samples: dict[tuple[str, int], list[float]] = {(s, n): [] for n in OPEN_REQUESTS for s in known}
    try:
        for _ in range(repeats):
            for system, open_requests in samples:
                budget = turns if system in _LIGHT else http_turns
                child = children[SYSTEMS[system][0]]
                samples[system, open_requests].append(asyncio.run(measure(system, child, open_requests, budget)))
    finally:
        for child in children.values():
            child.close()
    rows, ratios = [], {}
    for n in OPEN_REQUESTS:
        for system in SYSTEMS:
            notes = {"open_requests": n, "connections": links(system, n)}
            if system in known:
                rows.append(row_of(system, known[system], UNIT, samples[system, n], **notes))
            else:
                rows.append(absent(system, UNIT, **notes))
        ratios[n] = statistics.median(samples["pool", n]) / statistics.median(samples["frame echo", n])
    most, fewest = (statistics.median(samples["pool", n]) for n in (OPEN_REQUESTS[-1], OPEN_REQUESTS[0]))
    return rows, ratios, most / fewest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7, help="repetitions of every system")
    parser.add_argument("--turns", type=int, default=32768, help="turns per repetition of pool, door and floor")
    parser.add_argument("--http-turns", type=int, default=4096, help="turns per repetition of the HTTP rows")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--serve", choices=sorted({server for server, _ in SYSTEMS.values()}), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve(args.serve))
        return
    tune_collector()  # as rollout workers do
    rows, ratios, growth = run(args.repeats, args.turns, args.http_turns)
    print(table(rows))
    for n, ratio in ratios.items():
        print(f"pool / frame echo at {n} open requests: {ratio:.2f} (target {TARGET})")
    print(f"pool at {OPEN_REQUESTS[-1]} / at {OPEN_REQUESTS[0]} open requests: {growth:.2f} (target {GROWTH_TARGET})")
    if args.json:
        holds = all(ratio <= TARGET for ratio in ratios.values()) and growth <= GROWTH_TARGET
        print(result("rollout_wire", ratios[OPEN_REQUESTS[0]], TARGET, holds, rows))


if __name__ == "__main__":
    main()
