"""The token door over connections that are lost: nothing is sampled twice, and nobody waits for what is gone (P24)."""

import asyncio
import contextlib

import msgspec
import pytest
from test_door import TOKEN, WAIT_S, Engine, Peer, a_request, open_door, within

from headrace.platform.errors import DeadlineExceeded, EngineDead, EngineError, VersionUnavailable
from headrace.serving.door import messages
from headrace.serving.door.client import DoorClient
from headrace.serving.door.server import DoorServer


class Between:
    """A network between client and door. `deaf`: what the door says is lost. `down`: whoever connects is cut off."""

    def __init__(self, port):
        self.port = port
        self.deaf = False
        self.down = False
        self.tried = asyncio.Semaphore(0)
        self.swallowed = asyncio.Event()
        self._writers = []
        self._pumps = set()

    async def start(self):
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self._server.sockets[0].getsockname()[:2]

    async def _accept(self, reader, writer):
        self.tried.release()
        if self.down:
            writer.transport.abort()
            return
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.port)
        self._writers += [writer, far_writer]
        for source, sink, is_answer in ((reader, far_writer, False), (far_reader, writer, True)):
            pump = asyncio.create_task(self._pump(source, sink, is_answer))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(self, source, sink, is_answer):
        with contextlib.suppress(ConnectionError):
            while data := await source.read(1 << 16):
                if is_answer and self.deaf:
                    self.swallowed.set()
                else:
                    sink.write(data)
        sink.close()

    def cut(self):
        writers, self._writers = self._writers, []
        for writer in writers:
            writer.transport.abort()

    async def close(self):
        self._server.close()
        self.cut()
        await asyncio.gather(*self._pumps, return_exceptions=True)


@contextlib.asynccontextmanager
async def cuttable(engine, reconnect_s=WAIT_S, **options):
    async with open_door(engine, **options) as (server, _, port):
        between = Between(port)
        client = await DoorClient.connect(*await between.start(), TOKEN, reconnect_s=reconnect_s)
        try:
            yield server, client, between
        finally:
            await client.close()
            await between.close()


async def begun(engine, client, *numbers, **options):
    calls = [asyncio.ensure_future(client.generate(a_request(number, **options))) for number in numbers]
    for _ in numbers:
        await within(engine.started.acquire())
    return calls


async def test_a_lost_connection_does_not_end_what_runs():  # P24
    engine = Engine()
    engine.gate.clear()
    async with cuttable(engine) as (server, client, between):
        calls = await begun(engine, client, 0, 1, 2)
        between.cut()
        engine.gate.set()
        answers = await within(asyncio.gather(*calls))
        assert [answer.token_ids.tolist() for answer in answers] == [[3, 2, 1]] * 3
        assert len(engine.seen) == 3 and engine.cancelled == []
        assert client.retried == 3
        assert (client.open_requests, server.open_requests) == (0, 0)


async def test_a_lost_reply_is_not_sampled_twice():  # P24, case S7
    engine = Engine()
    async with cuttable(engine) as (server, client, between):
        between.deaf = True
        call = asyncio.ensure_future(client.generate(a_request(0)))
        await within(between.swallowed.wait())
        assert server.kept_results == 1
        between.deaf = False
        between.cut()
        assert (await within(call)).token_ids.tolist() == [3, 2, 1]
        assert len(engine.seen) == 1


async def test_a_server_that_is_away_is_tried_again():  # case S7
    engine = Engine()
    engine.gate.clear()
    async with cuttable(engine) as (_, client, between):
        (call,) = await begun(engine, client, 0)
        told = asyncio.Event()
        client.on_versions = told.set
        between.down = True
        between.cut()
        await within(told.wait())
        assert not client.is_connected
        assert list(client.versions()) == [6, 7], "it may come back with what it had"
        meanwhile = asyncio.ensure_future(client.generate(a_request(1)))
        for _ in range(4):
            await within(between.tried.acquire())
        between.down = False
        engine.gate.set()
        for answer in await within(asyncio.gather(call, meanwhile)):
            assert answer.token_ids.tolist() == [3, 2, 1]
        assert [request.key for request in engine.seen] == ["key-0", "key-1"]
        assert client.is_connected


async def test_deadlines_run_on_while_the_connection_is_lost():
    engine = Engine()
    engine.gate.clear()
    async with cuttable(engine) as (server, client, between):
        (call,) = await begun(engine, client, 0, deadline_s=0.2)
        between.down = True
        between.cut()
        with pytest.raises(DeadlineExceeded):
            await within(call)
        await within(engine.ended.acquire())
        assert server.open_requests == 0


async def test_what_was_cancelled_meanwhile_is_cancelled_there():
    engine = Engine()
    engine.gate.clear()
    async with cuttable(engine) as (_, client, between):
        calls = await begun(engine, client, 0, 1)
        between.down = True
        between.cut()
        await within(between.tried.acquire())
        await within(between.tried.acquire())
        calls[0].cancel()
        await asyncio.gather(calls[0], return_exceptions=True)
        between.down = False
        await within(engine.ended.acquire())
        assert engine.cancelled == ["key-0"]
        engine.gate.set()
        assert (await within(calls[1])).token_ids.tolist() == [3, 2, 1]


async def test_a_replica_that_is_not_reached_in_time_is_asked_nothing_until_it_is():
    engine = Engine()
    engine.gate.clear()
    async with cuttable(engine, reconnect_s=0.1) as (server, client, between):
        (call,) = await begun(engine, client, 0)
        between.down = True
        between.cut()
        with pytest.raises(EngineDead, match=r"not reached for 0\.1 s"):
            await within(call)
        assert not client.closed.is_set() and list(client.versions()) == []
        with pytest.raises(EngineDead, match="out of reach"):
            await client.generate(a_request(1))
        engine.gate.set()
        back = told(client, lambda: client.is_connected)
        between.down = False
        await within(back.wait())
        assert list(client.versions()) == [6, 7] and not server.open_requests
        assert (await within(client.generate(a_request(2)))).token_ids.tolist() == [3, 2, 1]


@pytest.mark.parametrize("is_down", [True, False])
async def test_a_session_that_was_released_meanwhile_does_not_stay_there(is_down):  # P19
    engine = Engine()
    async with cuttable(engine) as (server, client, between):
        await within(client.generate(a_request(0)))
        await within(client.generate(a_request(1)))
        assert server.sessions == 2
        lost = told(client, lambda: not client.is_connected)
        between.down = True
        between.cut()
        if is_down:
            await within(lost.wait())
        await client.release("session-0")  # into a connection that is dead already, or into none
        await client.release("session-1")
        await within(lost.wait())
        await within(asyncio.gather(*[between.tried.acquire() for _ in range(3)]))
        again = asyncio.ensure_future(client.generate(a_request(2, session="session-1")))
        await asyncio.sleep(0)
        between.down = False
        await within(again)
        await within(engine.ended.acquire())
        assert server.sessions == 1 and engine.released == ["session-0"], "one of them has come again"


async def test_a_client_that_is_cut_off_again_and_again_does_not_storm_the_door():
    engine = Engine()
    async with cuttable(engine) as (server, client, _):
        arrivals = []

        def poisoned(guest, ask, received_s):
            arrivals.append(ask.key)
            raise ValueError("nobody can read this")

        server._desk.ask = poisoned
        with pytest.raises(DeadlineExceeded):
            await within(client.generate(a_request(0, deadline_s=0.6)))
        assert 2 <= len(arrivals) <= 8


def told(client, condition):
    """Set when the client says that something has changed, and `condition` holds."""
    event = asyncio.Event()
    client.on_versions = lambda: event.set() if condition() else None
    return event


async def test_where_nobody_listens_any_more_the_replica_is_gone_at_once():  # case S5
    engine = Engine()
    engine.gate.clear()
    async with cuttable(engine) as (_, client, between):
        (call,) = await begun(engine, client, 0)
        await between.close()
        with pytest.raises(EngineDead, match="is gone"):
            await within(call)


async def test_another_life_of_the_replica_is_not_the_one_that_was_asked():  # case S6
    old, new = Engine(), Engine()
    old.gate.clear()
    async with cuttable(old) as (_, client, between), open_door(new) as (_, _, port):
        (call,) = await begun(old, client, 0)
        between.port = port
        between.cut()
        with pytest.raises(EngineDead, match="another one has taken its place"):
            await within(call)
        assert new.seen == []


async def test_a_goodbye_is_believed():
    engine = Engine()
    engine.gate.clear()
    async with cuttable(engine) as (server, client, between):
        (call,) = await begun(engine, client, 0)
        await server.close("the engine is dead: out of memory")
        with pytest.raises(EngineDead, match="out of memory"):
            await within(call)
        assert between.tried._value == 1, "nobody was dialled again"


# --- what the server keeps --------------------------------------------------------------------------------------------


async def test_results_are_kept_until_they_are_acknowledged():  # P24
    engine = Engine()
    async with cuttable(engine) as (server, client, _):
        await within(asyncio.gather(*(client.generate(a_request(n)) for n in range(20))))
        assert server.kept_results == 20
        await within(client.generate(a_request(20)))
        assert server.kept_results == 1, "acknowledged together with the next request"
        await client.release("session-20")
        await within(engine.ended.acquire())
        assert server.kept_results == 0


async def test_a_result_is_forgotten_after_its_deadline():
    async with open_door(Engine()) as (server, host, port):
        peer = await Peer.shaken(host, port)
        peer.ask(1, a_request(1, deadline_s=0.05))
        await peer.read()
        assert server.kept_results == 1
        async with asyncio.timeout(WAIT_S):
            while server.kept_results:  # noqa: ASYNC110 - a timer of the door ends it, and tells nobody
                await asyncio.sleep(0.01)
        await peer.close()


async def test_a_client_that_does_not_come_back_loses_requests_and_sessions():
    engine = Engine()
    engine.gate.clear()
    async with cuttable(engine, grace_s=0.05, reconnect_s=0.01) as (server, client, between):
        (call,) = await begun(engine, client, 0)
        between.down = True
        between.cut()
        with pytest.raises(EngineDead):
            await within(call)
        await within(engine.ended.acquire())
        await within(engine.ended.acquire())
        assert (engine.cancelled, engine.released) == (["key-0"], ["session-0"])
        assert (server.open_requests, server.sessions) == (0, 0)


async def test_who_asks_under_the_same_key_attaches():  # P24
    engine = Engine()
    engine.gate.clear()
    async with open_door(engine) as (_, host, port):
        first, second = await Peer.shaken(host, port), await Peer.shaken(host, port)
        first.ask(1, a_request(0))
        await within(engine.started.acquire())
        second.ask(7, a_request(0))
        (told,) = messages.decode_for_client(await first.read())
        assert isinstance(told, messages.Failure) and "asked for again" in told.message
        engine.gate.set()
        (reply,) = messages.decode_for_client(await second.read())
        assert isinstance(reply, messages.Reply) and reply.number == 7
        second.ask(8, a_request(0))
        (reply,) = messages.decode_for_client(await second.read())
        assert isinstance(reply, messages.Reply) and reply.number == 8
        assert len(engine.seen) == 1
        await first.close()
        await second.close()


async def test_a_key_belongs_to_one_request():
    engine = Engine()
    async with cuttable(engine) as (_, client, _):
        await within(client.generate(a_request(0)))
        client._arrived.clear()
        with pytest.raises(EngineError, match="another request"):
            await within(client.generate(msgspec.structs.replace(a_request(0), seed=9)))


# --- draining ---------------------------------------------------------------------------------------------------------


async def test_a_door_that_drains_finishes_its_sessions_and_takes_no_new_one():  # P22
    engine = Engine()
    async with cuttable(engine) as (server, client, _):
        await within(client.generate(a_request(0)))
        server.drain(0.0)
        with pytest.raises(VersionUnavailable, match="drains"):
            await within(client.generate(a_request(1)))
        assert client.is_draining
        await within(client.generate(a_request(2, session="session-0")))
        server.reopen()
        await within(client.generate(a_request(1)))
        assert not client.is_draining
        assert [request.key for request in engine.seen] == ["key-0", "key-2", "key-1"]


async def test_sessions_that_were_on_their_way_find_the_door_open():
    """Members of a group that was admitted before."""
    async with cuttable(Engine()) as (server, client, _):
        server.drain(60.0)
        await within(client.generate(a_request(0)))
        assert client.is_draining and server.sessions == 1


async def test_doors_have_lives_of_their_own():
    first, second = DoorServer(Engine(), TOKEN, "r"), DoorServer(Engine(), TOKEN, "r")
    assert first._instance != second._instance
