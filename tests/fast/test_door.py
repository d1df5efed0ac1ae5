"""The token door over real loopback sockets, with a scripted engine."""

import asyncio
import contextlib
import socket
import struct

import numpy as np
import pytest

from headrace.platform.errors import ConfigError, DeadlineExceeded, EngineDead, EngineError, VersionUnavailable
from headrace.platform.records import (
    FinishReason,
    Generation,
    GenerationRequest,
    SamplingParams,
    VersionRef,
    VersionSpan,
    f32,
    i32,
)
from headrace.serving.door import frames, messages
from headrace.serving.door.client import DoorClient
from headrace.serving.door.frames import FrameError
from headrace.serving.door.handshake import ClientHandshake, DoorRefused, RefusalReason
from headrace.serving.door.server import DoorServer

TOKEN = "correct horse"
WAIT_S = 10.0


def a_request(number=0, ids=(1, 2, 3), version=7, deadline_s=30.0, session=None):
    return GenerationRequest(
        key=f"key-{number}",
        session=session or f"session-{number}",
        token_ids=i32(ids),
        version=version,
        seed=number,
        sampling=SamplingParams(max_new_tokens=4, temperature=0.7),
        deadline_s=deadline_s,
    )


class Engine:
    """Echoes token ids backwards; a request waits while `gate` is closed, or raises what `errors` says for its key."""

    def __init__(self):
        self.held = [6, 7]
        self.gate = asyncio.Event()
        self.gate.set()
        self.errors = {}
        self.seen = []
        self.released = []
        self.cancelled = []
        self.started = asyncio.Semaphore(0)
        self.ended = asyncio.Semaphore(0)

    async def generate(self, request):
        self.seen.append(request)
        self.started.release()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.append(request.key)
            self.ended.release()
            raise
        if request.key in self.errors:
            raise self.errors[request.key]
        ids = request.token_ids[::-1].copy()
        spans = (VersionSpan(VersionRef("p", request.version), 0, len(ids)),)
        return Generation(ids, f32([-0.5] * len(ids)), FinishReason.STOP, spans, "replica-1", "build-1")

    async def release(self, session):
        self.released.append(session)
        self.ended.release()

    def versions(self):
        return self.held


@contextlib.asynccontextmanager
async def open_door(engine, **options):
    server = DoorServer(engine, TOKEN, "replica-1", **options)
    host, port = await server.start()
    try:
        yield server, host, port
    finally:
        await server.close()


@contextlib.asynccontextmanager
async def connected(engine, **options):
    async with open_door(engine, **options) as (server, host, port):
        client = await DoorClient.connect(host, port, TOKEN)
        try:
            yield server, client
        finally:
            await client.close()


async def within(awaitable):
    return await asyncio.wait_for(awaitable, WAIT_S)


# --- requests ---------------------------------------------------------------------------------------------------------


async def test_records_cross_unchanged():
    engine = Engine()
    async with connected(engine) as (_, client):
        request = a_request(3, ids=range(200))
        generation = await within(client.generate(request))
        seen = engine.seen[0]
        for name in ("key", "session", "version", "seed", "sampling", "deadline_s"):
            assert getattr(seen, name) == getattr(request, name), name
        assert seen.token_ids.dtype == np.int32
        assert seen.token_ids.tolist() == list(range(200))
        assert generation.token_ids.tolist() == list(range(199, -1, -1))
        assert generation.logprobs.dtype == np.float32
        assert generation.logprobs.tolist() == [-0.5] * 200
        assert generation.version_spans == (VersionSpan(VersionRef("p", 7), 0, 200),)
        assert (generation.finish_reason, generation.replica) == (FinishReason.STOP, "replica-1")
        assert generation.engine_build == "build-1"
        assert client.replica == "replica-1"
        assert list(client.versions()) == [6, 7]


async def test_500_requests_at_once_are_all_served():  # case S11
    engine = Engine()
    async with connected(engine) as (server, client):
        engine.gate.clear()
        calls = [asyncio.ensure_future(client.generate(a_request(n, ids=(n, n + 1)))) for n in range(500)]
        for _ in range(500):
            await within(engine.started.acquire())
        assert (client.open_requests, server.open_requests) == (500, 500)
        engine.gate.set()
        replies = await within(asyncio.gather(*calls))
        assert [reply.token_ids.tolist() for reply in replies] == [[n + 1, n] for n in range(500)]
        assert (client.open_requests, server.open_requests) == (0, 0)


async def test_cancelling_the_call_cancels_the_request():
    engine = Engine()
    async with connected(engine) as (server, client):
        engine.gate.clear()
        calls = [asyncio.ensure_future(client.generate(a_request(n))) for n in range(2)]
        for _ in range(2):
            await within(engine.started.acquire())
        calls[0].cancel()
        await within(engine.ended.acquire())
        assert engine.cancelled == ["key-0"]
        engine.gate.set()
        assert (await within(calls[1])).token_ids.tolist() == [3, 2, 1]
        assert calls[0].cancelled()
        assert (client.open_requests, server.open_requests) == (0, 0)


async def test_release_reaches_the_engine():  # P19
    engine = Engine()
    async with connected(engine) as (_, client):
        await client.release("session-9")
        await within(engine.ended.acquire())
        assert engine.released == ["session-9"]


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (VersionUnavailable("version 9 is not held"), VersionUnavailable),
        (DeadlineExceeded("too slow"), DeadlineExceeded),
        (EngineDead("core is gone"), EngineDead),
        (EngineError("out of memory"), EngineError),
        (ZeroDivisionError("oops"), EngineError),
    ],
)
async def test_errors_cross_as_themselves(raised, expected):
    engine = Engine()
    engine.errors["key-0"] = raised
    async with connected(engine) as (_, client):
        with pytest.raises(expected, match=str(raised)) as caught:
            await within(client.generate(a_request(0)))
        assert type(caught.value) is expected
        assert (await within(client.generate(a_request(1)))).token_ids.tolist() == [3, 2, 1]


async def test_an_engine_that_cancels_itself_is_an_error_not_a_hang():
    engine = Engine()
    engine.errors["key-0"] = asyncio.CancelledError()
    async with connected(engine) as (_, client):
        with pytest.raises(EngineError, match="the engine cancelled"):
            await within(client.generate(a_request(0)))


async def test_the_deadline_of_a_request_ends_it_on_both_sides():
    engine = Engine()
    async with connected(engine) as (server, client):
        engine.gate.clear()
        long = asyncio.ensure_future(client.generate(a_request(0, deadline_s=30.0)))
        with pytest.raises(DeadlineExceeded, match=r"0\.05 s|its deadline"):
            await within(client.generate(a_request(1, deadline_s=0.05)))
        await within(engine.ended.acquire())
        assert engine.cancelled == ["key-1"]
        engine.gate.set()
        assert (await within(long)).token_ids.tolist() == [3, 2, 1]
        assert server.open_requests == 0


async def test_the_server_enforces_the_deadline_by_itself():
    engine = Engine()
    engine.gate.clear()
    async with open_door(engine) as (server, host, port):
        peer = await Peer.shaken(host, port)
        peer.ask(1, a_request(1, deadline_s=0.05))
        (failure,) = messages.decode_for_client(await peer.read())
        assert isinstance(failure, messages.Failure)
        assert failure.code is messages.ErrorCode.DEADLINE_EXCEEDED
        await within(engine.ended.acquire())
        assert server.open_requests == 0
        assert engine.cancelled == ["key-1"]
        await peer.close()


async def test_a_request_that_is_larger_than_a_frame_fails_alone(monkeypatch):
    engine = Engine()
    async with connected(engine) as (_, client):
        monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 2000)
        with pytest.raises(FrameError, match="the limit is 1995"):
            await within(client.generate(a_request(0, ids=range(600))))
        assert (await within(client.generate(a_request(1)))).token_ids.tolist() == [3, 2, 1]


async def test_token_ids_of_another_type_are_refused():
    async with connected(Engine()) as (_, client):
        request = GenerationRequest("k", "s", np.zeros(3, np.int64), 7, 0)
        with pytest.raises(TypeError, match="i32"):
            await within(client.generate(request))
        assert client.open_requests == 0


# --- versions ---------------------------------------------------------------------------------------------------------


async def test_versions_are_pushed_to_every_client():
    engine = Engine()
    async with connected(engine) as (server, first):
        second = await DoorClient.connect("127.0.0.1", server.port, TOKEN)
        told = {id(client): asyncio.Event() for client in (first, second)}
        for client in (first, second):
            client.on_versions = told[id(client)].set
        engine.held = [7, 8]
        server.announce_versions()
        for event in told.values():
            await within(event.wait())
        assert [list(client.versions()) for client in (first, second)] == [[7, 8], [7, 8]]
        await second.close()


# --- the end of a connection ------------------------------------------------------------------------------------------


async def test_a_lost_connection_fails_open_requests_at_once():
    engine = Engine()
    async with connected(engine) as (server, client):
        engine.gate.clear()
        calls = [asyncio.ensure_future(client.generate(a_request(n))) for n in range(3)]
        for _ in range(3):
            await within(engine.started.acquire())
        closed = []
        client.on_closed = lambda: closed.append(True)
        await server.close()
        results = await within(asyncio.gather(*calls, return_exceptions=True))
        assert [type(result) for result in results] == [EngineDead] * 3
        assert client.closed.is_set()
        assert closed == [True]
        assert list(client.versions()) == []
        with pytest.raises(EngineDead, match="replica-1 is gone"):
            await within(client.generate(a_request(9)))
        await client.release("session-1")


async def test_a_client_that_says_farewell_takes_its_requests_along():
    engine = Engine()
    async with connected(engine, grace_s=60.0) as (server, client):
        engine.gate.clear()
        call = asyncio.ensure_future(client.generate(a_request(0)))
        await within(engine.started.acquire())
        await client.close()
        with pytest.raises(EngineDead):
            await within(call)
        await within(engine.ended.acquire())
        await within(engine.ended.acquire())
        assert (engine.cancelled, engine.released) == (["key-0"], ["session-0"])
        assert (server.open_requests, server.sessions) == (0, 0)


async def test_close_ends_open_requests():
    engine = Engine()
    async with connected(engine) as (_, client):
        engine.gate.clear()
        call = asyncio.ensure_future(client.generate(a_request(0)))
        await within(engine.started.acquire())
        await client.close()
        with pytest.raises(EngineDead, match="closed on this side"):
            await within(call)


# --- peers that do not play by the rules ------------------------------------------------------------------------------


class Peer:
    """A raw socket that speaks frames, or whatever a test wants."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    @classmethod
    async def plain(cls, host, port):
        return cls(*await asyncio.open_connection(host, port))

    @classmethod
    async def shaken(cls, host, port):
        peer, handshake = await cls.plain(host, port), ClientHandshake(TOKEN)
        peer.send(handshake.opening)
        peer.send(handshake.receive(await peer.read()))
        handshake.receive(await peer.read())
        (announced,) = messages.decode_for_client(await peer.read())
        assert isinstance(announced, messages.Versions)
        return peer

    def send(self, body):
        self.writer.write(struct.pack("<I", len(body)) + body)

    def ask(self, number, request):
        """One request in a frame of its own."""
        self.send(b"\x91" + messages.encode_request(number, request, request.deadline_s))

    async def read(self):
        (length,) = struct.unpack("<I", await within(self.reader.readexactly(4)))
        return await within(self.reader.readexactly(length))

    async def rest(self):
        """What is left until the other side closes; a reset counts as closed."""
        try:
            return await within(self.reader.read())
        except ConnectionError:
            return b""

    async def close(self):
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


async def test_a_wrong_token_is_refused_on_both_sides():
    engine = Engine()
    async with open_door(engine) as (server, host, port):
        with pytest.raises(DoorRefused, match="do not hold the same token") as refused:
            await within(DoorClient.connect(host, port, "guess"))
        assert refused.value.reason is RefusalReason.WRONG_TOKEN
        assert server.refused == {RefusalReason.WRONG_TOKEN: 1}


async def test_a_protocol_mismatch_is_refused_on_both_sides():
    async with open_door(Engine()) as (server, host, port):
        peer, handshake = await Peer.plain(host, port), ClientHandshake(TOKEN, oldest=90, newest=99)
        peer.send(handshake.opening)
        with pytest.raises(DoorRefused, match="protocols 2 to 2, the client 90 to 99") as refused:
            handshake.receive(await peer.read())
        assert refused.value.reason is RefusalReason.PROTOCOL_MISMATCH
        assert await peer.rest() == b""
        assert server.refused == {RefusalReason.PROTOCOL_MISMATCH: 1}
        await peer.close()


@pytest.mark.parametrize(
    "opening",
    [
        b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
        struct.pack("<I", 5000) + bytes(5000),
        struct.pack("<I", 3) + b"\xc1\xff\x00",
        struct.pack("<I", 0),
    ],
    ids=["another protocol", "oversize", "garbage", "empty"],
)
async def test_a_stranger_is_refused_and_cut_off(opening):
    async with open_door(Engine()) as (server, host, port):
        peer = await Peer.plain(host, port)
        peer.writer.write(opening)
        await peer.rest()
        assert server.refused == {RefusalReason.MALFORMED: 1}
        await peer.close()


async def test_a_batch_over_many_frames_arrives_in_order():
    engine = Engine()
    async with connected(engine) as (_, client):
        calls = [client.generate(a_request(n, ids=range(5_000))) for n in range(20)]
        await within(asyncio.gather(*calls))
        assert [request.key for request in engine.seen] == [f"key-{n}" for n in range(20)]


async def test_a_stranger_can_ask_for_nothing():
    engine = Engine()
    async with open_door(engine) as (server, host, port):
        peer = await Peer.plain(host, port)
        peer.ask(1, a_request())
        await peer.rest()
        assert engine.seen == []
        assert server.refused == {RefusalReason.MALFORMED: 1}
        await peer.close()


async def test_a_silent_stranger_is_cut_off():
    async with open_door(Engine(), handshake_deadline_s=0.05) as (server, host, port):
        peer = await Peer.plain(host, port)
        assert await peer.rest() == b""
        assert server.refused == {RefusalReason.TOO_SLOW: 1}
        await peer.close()


@pytest.mark.parametrize(
    "nonsense",
    [struct.pack("<I", 17 << 20), struct.pack("<I", 2) + b"\xc1\xc1", struct.pack("<I", 4) + b"\x91\x92\x01\x02"],
    ids=["oversize", "garbage", "half a message"],
)
async def test_a_client_that_breaks_the_protocol_is_cut_off_alone(nonsense):
    engine = Engine()
    async with connected(engine) as (server, client):
        peer = await Peer.shaken("127.0.0.1", server.port)
        peer.writer.write(nonsense)
        assert await peer.rest() == b""
        assert (await within(client.generate(a_request()))).token_ids.tolist() == [3, 2, 1]
        await peer.close()


async def test_a_client_that_breaks_the_protocol_loses_its_requests():
    engine = Engine()
    engine.gate.clear()
    async with open_door(engine) as (_, host, port):
        peer = await Peer.shaken(host, port)
        peer.ask(1, a_request())
        await within(engine.started.acquire())
        peer.writer.write(struct.pack("<I", 2) + b"\xc1\xc1")
        assert await peer.rest() == b""
        await within(engine.ended.acquire())
        assert engine.cancelled == ["key-0"]
        await peer.close()


@contextlib.asynccontextmanager
async def stranger_server(handle):
    """A server that is no token door."""
    writers = []

    async def accept(reader, writer):
        writers.append(writer)
        await handle(reader, writer)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[:2]
    finally:
        server.close()
        for writer in writers:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


async def test_a_peer_that_accepts_and_never_answers_ends_at_the_deadline():  # case X8
    async def never(reader, writer):
        await reader.read()

    async with stranger_server(never) as (host, port):
        with pytest.raises(DeadlineExceeded, match=r"within 0\.1 s"):
            await within(DoorClient.connect(host, port, TOKEN, deadline_s=0.1))


async def test_a_server_that_is_no_token_door_is_refused():
    async def other(reader, writer):
        await reader.read(10)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with stranger_server(other) as (host, port):
        with pytest.raises(EngineError, match=r"a frame of|not the handshake"):
            await within(DoorClient.connect(host, port, TOKEN))


async def test_nobody_there_is_engine_dead():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(EngineDead, match="no connection"):
        await within(DoorClient.connect("127.0.0.1", port, TOKEN))


async def test_a_server_without_a_token_does_not_start():
    with pytest.raises(ConfigError, match="token"):
        DoorServer(Engine(), "", "r")


# --- back-pressure ----------------------------------------------------------------------------------------------------


async def test_a_slow_reader_is_held_back_and_hurts_nobody_else():
    engine = Engine()
    async with connected(engine) as (server, client):
        peer = await Peer.shaken("127.0.0.1", server.port)
        transport = peer.writer.transport
        transport.pause_reading()
        (session,) = [s for s in server._connections if s.is_open and s is not server_session_of(server, client)]
        number = 0
        while not session._paused:
            number += 1
            peer.ask(number, a_request(number, ids=range(20_000)))
            await within(engine.started.acquire())
        asked = len(engine.seen)
        assert (await within(client.generate(a_request()))).token_ids.tolist() == [3, 2, 1]
        assert len(engine.seen) == asked + 1
        transport.resume_reading()
        answered = []
        while len(answered) < number:
            answered += [reply.number for reply in messages.decode_for_client(await peer.read())]
        assert answered == list(range(1, number + 1))
        await peer.close()


def server_session_of(server, client):
    """The server's end of `client`."""
    ours = client._link._transport.get_extra_info("sockname")
    (session,) = [s for s in server._connections if s._transport.get_extra_info("peername") == ours]
    return session


async def test_a_client_that_never_reads_is_cut_off():
    engine = Engine()
    async with open_door(engine, stall_deadline_s=0.1) as (server, host, port):
        peer = await Peer.shaken(host, port)
        peer.writer.transport.pause_reading()
        (session,) = server._connections
        number = 0
        while not session._paused:
            number += 1
            peer.ask(number, a_request(number, ids=range(20_000)))
            await within(engine.started.acquire())
        await within(asyncio.shield(session.gone))
        assert server._connections == set()
        await peer.close()


async def test_a_full_queue_makes_new_requests_wait_until_their_deadline(monkeypatch):
    monkeypatch.setattr(frames, "QUEUE_LIMIT_BYTES", 100)
    monkeypatch.setattr("headrace.serving.door.client.QUEUE_LIMIT_BYTES", 100)
    engine = Engine()
    async with connected(engine) as (_, client):
        client._link.pause_writing()
        first = asyncio.ensure_future(client.generate(a_request(0, ids=range(100))))
        with pytest.raises(DeadlineExceeded):
            await within(client.generate(a_request(1, deadline_s=0.05)))
        second = asyncio.ensure_future(client.generate(a_request(2)))
        client._link.resume_writing()
        await within(asyncio.gather(first, second))
        assert [request.key for request in engine.seen] == ["key-0", "key-2"]
