"""Frames survive any chunking; the size bound holds; the handshake, without I/O."""

import asyncio
import pickle
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.serving.door.deadlines import DeadlineTimer
from headrace.serving.door.frames import FrameError, FrameReader
from headrace.serving.door.handshake import (
    Challenge,
    ClientHandshake,
    DoorRefused,
    RefusalReason,
    ServerHandshake,
    Welcome,
)


def framed(*bodies: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(body)) + body for body in bodies)


@given(
    bodies=st.lists(st.binary(max_size=300), max_size=20),
    cuts=st.lists(st.integers(min_value=1, max_value=400), max_size=200),
)
def test_frames_survive_any_chunking(bodies, cuts):
    stream = framed(*bodies)
    reader, got, at = FrameReader(300), [], 0
    for cut in [*cuts, len(stream)]:
        got += list(reader.feed(stream[at : at + cut]))
        at += cut
    assert got == bodies


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=5))
def test_frames_survive_single_bytes(bodies):
    reader = FrameReader(40)
    got = [body for byte in framed(*bodies) for body in reader.feed(bytes([byte]))]
    assert got == bodies


def test_a_frame_over_the_bound_is_refused_after_those_before_it():
    got = []
    with pytest.raises(FrameError, match="a frame of 11 bytes; the limit is 10"):
        for body in FrameReader(10).feed(framed(b"ok", b"x" * 11)):
            got.append(body)
    assert got == [b"ok"]


def test_the_bound_may_change_between_two_frames_of_one_chunk():
    reader, got = FrameReader(2), []
    for body in reader.feed(framed(b"ok", b"x" * 11)):
        got.append(body)
        reader.max_bytes = 11
    assert got == [b"ok", b"x" * 11]


def shake(client: ClientHandshake, server: ServerHandshake) -> None:
    challenge = server.receive(client.opening)
    proof = client.receive(challenge)
    assert proof is not None
    assert client.receive(server.receive(proof)) is None


def test_handshake_tells_the_replica():
    client, server = ClientHandshake("secret"), ServerHandshake("secret", "replica-3")
    shake(client, server)
    assert server.done
    assert client.replica == "replica-3"


def test_the_token_never_travels():
    token = "a-very-marked-token"
    client, server = ClientHandshake(token), ServerHandshake(token, "r")
    sent = [client.opening]
    sent.append(server.receive(sent[-1]))
    sent.append(client.receive(sent[-1]))
    sent.append(server.receive(sent[-1]))
    assert not any(token.encode() in frame for frame in sent)


def test_wrong_token_is_refused_by_the_server():
    client, server = ClientHandshake("mine"), ServerHandshake("yours", "r")
    proof = client.receive(server.receive(client.opening))
    with pytest.raises(DoorRefused) as refused:
        server.receive(proof)
    assert refused.value.reason is RefusalReason.WRONG_TOKEN
    assert not server.done


def test_a_server_without_the_token_is_refused_by_the_client():
    client = ClientHandshake("secret")
    client.receive(msgspec.msgpack.encode(Challenge(2, bytes(32))))
    with pytest.raises(DoorRefused) as refused:
        client.receive(msgspec.msgpack.encode(Welcome(bytes(32), "impostor")))
    assert refused.value.reason is RefusalReason.WRONG_TOKEN
    assert client.replica is None


def test_a_recorded_proof_is_worth_nothing_later():
    client = ClientHandshake("secret")
    first, second = ServerHandshake("secret", "r"), ServerHandshake("secret", "r")
    proof = client.receive(first.receive(client.opening))
    second.receive(client.opening)
    with pytest.raises(DoorRefused):
        second.receive(proof)


@pytest.mark.parametrize(("client_range", "server_range", "spoken"), [((1, 3), (2, 5), 3), ((2, 2), (1, 2), 2)])
def test_the_newest_common_protocol_is_spoken(client_range, server_range, spoken):
    client, server = ClientHandshake("t", *client_range), ServerHandshake("t", "r", *server_range)
    challenge = msgspec.msgpack.decode(server.receive(client.opening))
    assert challenge[1] == spoken


@pytest.mark.parametrize(("client_range", "server_range"), [((1, 1), (2, 3)), ((4, 5), (2, 3))])
def test_no_common_protocol_is_refused(client_range, server_range):
    client, server = ClientHandshake("t", *client_range), ServerHandshake("t", "r", *server_range)
    with pytest.raises(DoorRefused, match="run the same headrace") as refused:
        server.receive(client.opening)
    assert refused.value.reason is RefusalReason.PROTOCOL_MISMATCH


@given(st.binary(max_size=100))
def test_garbage_is_refused_by_name(body):
    with pytest.raises(DoorRefused) as refused:
        ServerHandshake("t", "r").receive(body)
    assert refused.value.reason is RefusalReason.MALFORMED


def test_a_refusal_pickles():
    again = pickle.loads(pickle.dumps(DoorRefused("no", RefusalReason.WRONG_TOKEN)))
    assert (str(again), again.reason) == ("no", RefusalReason.WRONG_TOKEN)


class ManualLoop:
    """The two calls that a DeadlineTimer makes, with a clock that a test moves."""

    def __init__(self):
        self.now = 0.0
        self.timers = []

    def time(self):
        return self.now

    def call_at(self, when, callback):
        handle = asyncio.TimerHandle(when, callback, (), asyncio.get_running_loop())
        self.timers.append(handle)
        return handle

    def go(self, now):
        self.now = now
        due = [timer for timer in self.timers if timer.when() <= now and not timer.cancelled()]
        self.timers = [timer for timer in self.timers if timer.when() > now and not timer.cancelled()]
        for timer in due:
            timer._run()


async def test_one_timer_serves_many_deadlines():
    loop, dues, ended = ManualLoop(), {"a": 5.0, "b": 2.0, "c": 9.0}, []

    def sweep(now):
        for name in [name for name, due in dues.items() if due <= now]:
            del dues[name]
            ended.append((name, now))
        return min(dues.values(), default=float("inf"))

    timer = DeadlineTimer(loop, sweep)
    for due in dues.values():
        timer.arm(due)
    assert len([t for t in loop.timers if not t.cancelled()]) == 1
    for now in (1.0, 2.0, 5.0, 9.0):
        loop.go(now)
    assert ended == [("b", 2.0), ("a", 5.0), ("c", 9.0)]
    assert loop.timers == []
