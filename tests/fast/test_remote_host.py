"""A host in this process, played over loopback: by headrace's client, by an OpenEnv client, and by those who err."""

import asyncio
import json
import logging
import threading
import urllib.error
import urllib.request

import pytest
from remote_kit import (
    FAULTS,
    TASK,
    Obedient,
    ObedientOffer,
    address_of,
    hosting,
    plain,
    pooled,
    say,
    session_at,
    until,
)
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from headrace.actors.remote.group_version import GroupVersion
from headrace.actors.remote.host import EnvironmentHost, HostSettings
from headrace.actors.remote.protocol import decode, encode
from headrace.platform.errors import (
    ConfigError,
    DeadlineExceeded,
    EnvironmentFault,
    HostAway,
    InfrastructureFault,
    SandboxDied,
)
from headrace.platform.records.message import Task, ToolCall


async def page(host, path, token=""):
    """Status and JSON of a page."""

    def get():
        request = urllib.request.Request(f"http://127.0.0.1:{host.port}{path}")
        if token:
            request.add_header("Authorization", f"Bearer {token}")
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    return await asyncio.to_thread(get)


async def test_a_session_is_the_same_as_a_local_one():  # case X16
    messages = [say("a"), say("", ToolCall("t", {"x": [1, {"é": None}]})), say("surrogate"), say("end")]
    local = Obedient()
    async with hosting() as host, session_at(host) as remote:
        observation = await local.reset(TASK, 7)
        assert await remote.reset(TASK, 7) == observation
        for n, message in enumerate(messages):
            result, expected = await remote.step(message, f"k{n}"), await local.step(message, f"k{n}")
            if message.content == "surrogate":
                assert result.messages[0].content == "a?b"
            else:
                assert result == expected
        assert (remote.name, remote.version, remote.tools()) == ("obedient", "1", ())
        assert remote.provenance.pool == address_of(host)
        assert remote.provenance.sandbox_id == "box-1"
        assert remote.provenance.external == local.provenance.external
    assert remote.provenance.pool == address_of(host)  # also after close


async def test_the_image_digest_is_part_of_the_handshake():
    async with hosting(image_digest="sha256:abc") as host, session_at(host) as remote:
        await remote.reset(TASK, 1)
        assert remote.provenance.image_digest == "sha256:abc"
        async with plain(host) as ask:
            said = await ask("hello", {})
            assert (said.data["image_digest"], said.data["version"], said.data["protocol"]) == ("sha256:abc", "1", 1)
            assert (said.data["capacity"], said.data["sessions"]) == (64, 2)


@pytest.mark.parametrize(
    ("word", "cls", "transient"),
    [
        ("sandbox", SandboxDied, True),
        ("infrastructure", InfrastructureFault, True),
        ("transient", EnvironmentFault, True),
        ("bug", EnvironmentFault, False),
        ("key", EnvironmentFault, False),
        ("exit", EnvironmentFault, False),
        ("time", DeadlineExceeded, None),
    ],
)
async def test_errors_come_out_of_the_client_as_what_they_were(word, cls, transient):  # case E13
    async with hosting() as host, session_at(host) as remote:
        await remote.reset(TASK, 1)
        with pytest.raises(cls) as found:
            await remote.step(say(word), "k")
        assert type(found.value) is cls
        assert str(FAULTS[word]) in str(found.value)
        assert getattr(found.value, "transient", None) is transient
    async with hosting() as host, session_at(host) as remote:
        with pytest.raises(cls):
            await remote.reset(Task("t", "obedient", data={"word": word}), 1)


async def test_keys_are_idempotent_on_the_host():  # P25
    async with hosting() as host, session_at(host) as remote:
        await remote.reset(TASK, 1)
        first = await remote.step(say("a"), "k")
        assert await remote.step(say("a"), "k") == first
        with pytest.raises(EnvironmentFault, match="another message"):
            await remote.step(say("b"), "k")
        assert (await remote.step(say("a"), "k2")).state_hash != first.state_hash


async def test_the_order_of_calls_is_kept():
    async with hosting() as host, session_at(host) as remote:
        with pytest.raises(EnvironmentFault, match="before reset"):
            await remote.step(say("a"), "k")
        await remote.reset(TASK, 1)
        await remote.step(say("end"), "k")
        with pytest.raises(EnvironmentFault, match="after the end"):
            await remote.step(say("a"), "k2")
        again = await remote.reset(TASK, 2)  # on the same host and connection
        assert (again.metadata["seed"], host.played) == (2, 1)
        await remote.close()
        await remote.close()
        with pytest.raises(EnvironmentFault, match="after close"):
            await remote.step(say("a"), "k3")


async def test_a_call_that_outruns_its_deadline_ends_the_session():  # case X8
    offer = ObedientOffer()
    async with hosting(offer) as host, session_at(host, step_s=0.2) as remote:
        await remote.reset(TASK, 1)
        with pytest.raises(DeadlineExceeded, match=r"a step took longer than 0\.2 s"):
            await remote.step(say("hang"), "k")
        await until(lambda: not host.sessions)
        assert len(offer.closed) == 1


async def test_a_peer_that_accepts_and_never_answers():  # case X8
    async def silent(reader, writer):
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    loop = asyncio.get_running_loop()
    async with server, session_at(f"ws://127.0.0.1:{port}", wait_s=1.0, connect_s=0.2) as remote:
        began = loop.time()
        with pytest.raises(HostAway, match=r"no host took a session within .*no connection within 0\.2 s"):
            await remote.reset(TASK, 1)
        assert loop.time() - began < 2.0
        server.close()


async def test_a_client_that_goes_away_ends_its_call_and_its_session():
    offer = ObedientOffer()
    async with hosting(offer) as host, pooled(host) as pool:
        remote = pool.session(GroupVersion(), 5.0)
        await remote.reset(TASK, 1)
        step = asyncio.ensure_future(remote.step(say("hang"), "k"))
        await asyncio.sleep(0)
        step.cancel()
        await asyncio.wait({step})
        await remote.close()
        await until(lambda: not host.sessions)
        assert len(offer.closed) == 1


async def test_cancelled_at_any_await_nothing_leaks():  # case X4
    async def episode(pool, group):
        remote = pool.session(group, 5.0)
        try:
            await remote.reset(TASK, 1)
            await remote.step(say("a"), "k")
        finally:
            try:
                await remote.close()
            except asyncio.CancelledError:  # as the episode does
                await remote.close()
                raise

    offer = ObedientOffer()
    async with hosting(offer) as host, pooled(host) as pool:
        await episode(pool, GroupVersion())
        ended, turns = 0, 0
        while not ended:  # cancelled at every turn of the loop until an episode gets through
            group = GroupVersion()
            task = asyncio.ensure_future(episode(pool, group))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait({task})
            ended, turns = not task.cancelled(), turns + 1
            assert group.beginning == 0
        assert turns > 10
        assert [each.sessions for each in pool.hosts()] == [0]
        await until(lambda: not host.sessions)
        await until(lambda: len(offer.closed) == offer.made)
        assert offer.made > 10


async def test_more_than_it_can_take_are_refused_by_name():
    async with hosting(capacity=1) as host, session_at(host) as first:
        await first.reset(TASK, 1)
        async with plain(host) as ask:
            said = await ask("reset", {})
            assert (said.type, said.data["code"]) == ("error", "full")
            with pytest.raises(ConnectionClosed):
                await ask.connection.recv()
        async with session_at(host, wait_s=0.5) as second:
            with pytest.raises(HostAway, match="all 1 sessions are taken"):
                await second.reset(TASK, 1)
        waiting = asyncio.ensure_future(_reset_one(host))
        await asyncio.sleep(0.05)
        await first.close()
        assert (await waiting).metadata["seed"] == 3


async def _reset_one(host):
    async with session_at(host) as session:
        return await session.reset(TASK, 3)


async def test_idle_sessions_are_reaped():
    offer = ObedientOffer()
    async with hosting(offer, idle_s=0.2) as host, session_at(host) as remote:
        await remote.reset(TASK, 1)
        await until(lambda: not host.sessions)
        assert len(offer.closed) == 1
        with pytest.raises(HostAway, match=r"nothing was said for 0\.2 s"):
            await remote.step(say("a"), "k")


async def test_a_broken_message_concerns_its_session_only():
    async with hosting() as host, session_at(host) as remote, plain(host) as ask:
        await remote.reset(TASK, 1)
        for raw, code in (("{", "INVALID_JSON"), ("[1]", "VALIDATION_ERROR"), ('{"type":"x"}', "UNKNOWN_TYPE")):
            await ask.connection.send(raw)
            assert decode(await ask.connection.recv()).data["code"] == code
        assert (await ask("reset", {"task": 3})).data["code"] == "VALIDATION_ERROR"
        assert (await ask("reset", {"seed": -1})).data["code"] == "VALIDATION_ERROR"
        assert (await ask("step", {"word": "a"})).data["code"] == "VALIDATION_ERROR"
        rude = await connect(f"{address_of(host)}/ws", proxy=None, max_size=None, compression=None)
        with pytest.raises((ConnectionClosed, AttributeError)):  # which one, see Link.close
            await rude.send("x" * (33 * 2**20))
            await rude.recv()
        assert (await remote.step(say("a"), "k")).metadata["echo"] == "a"


@pytest.mark.parametrize(
    "data",
    [
        {"type": "\\" * 2**22},
        {"type": "step", "data": {"x" * 2**20: 1}},
        {"type": "reset", "data": {"seed": "x" * 2**20}},
        {"type": "reset", "data": {"task": {"task_id": "t", "environment": "e", "split": ["x" * 2**20]}, "seed": 1}},
        {"type": "step", "data": {"message": {"role": "x" * 2**20}, "key": "k"}},
    ],
    ids=["type", "field", "seed", "task", "role"],
)
async def test_little_of_a_hostile_message_is_repeated(data, caplog):
    caplog.set_level(logging.DEBUG)
    async with hosting() as host, session_at(host) as other, plain(host) as ask:
        await other.reset(TASK, 1)
        await ask.connection.send(encode(data), text=True)
        told = await ask.connection.recv()
        assert decode(told).type == "error"
        assert len(told) < 1000
        assert (await ask("state")).type == "state"  # the session goes on
        assert (await other.step(say("a"), "k")).metadata["echo"] == "a"
    assert sum(len(each.getMessage()) + len(each.exc_text or "") for each in caplog.records) < 5000
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


async def test_a_path_that_is_none_is_refused_quietly(caplog):
    async with hosting() as host:
        for path, code in (("//[", b"400"), ("/" + "x" * 5000, b"404")):
            reader, writer = await asyncio.open_connection("127.0.0.1", host.port)
            lines = f"GET {path} HTTP/1.1", "Host: h", "Connection: Upgrade", "Upgrade: websocket"
            more = "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==", "Sec-WebSocket-Version: 13", "", ""
            writer.write("\r\n".join([*lines, *more]).encode())
            try:
                answer = await asyncio.wait_for(reader.readuntil(b"}"), 5.0)
                assert answer.split()[1] == code
                assert len(answer) < 500
            finally:
                writer.close()
                await writer.wait_closed()
    assert not caplog.records


async def test_an_answer_that_is_too_long_is_the_environments_fault():
    async with hosting() as host, session_at(host) as remote:
        await remote.reset(TASK, 1)
        with pytest.raises(EnvironmentFault, match=r"an answer of 346\d+ bytes") as found:
            await remote.step(say("long"), "k")
        assert found.value.transient is False


async def test_an_openenv_client_plays():
    async with hosting() as host, plain(host) as ask:
        assert (await ask("state")).data == {"episode_id": None, "step_count": 0}
        said = await ask("reset", {"seed": 5})
        assert said.type == "observation"
        assert (said.data["observation"]["text"], said.data["reward"], said.data["done"]) == ("go", None, False)
        assert said.data["observation"]["metadata"]["seed"] == 5
        said = await ask("step", {"tool": "t", "arguments": {"n": 1}})
        assert said.data["observation"]["metadata"]["calls"] == [{"n": 1}]
        assert (await ask("step", {"message": "a", "metadata": {}})).data["observation"]["text"] == "a"
        said = await ask("step", {"message": "bug"})
        assert (said.type, said.data["code"]) == ("error", "EXECUTION_ERROR")
        assert "it is broken" in said.data["message"]
        said = await ask("step", {"message": "end"})
        assert (said.data["reward"], said.data["done"]) == (1.0, True)
        assert (await ask("state")).data == {"episode_id": "1-1", "step_count": 3}
        await ask.connection.send(encode({"type": "close"}), text=True)
        await until(lambda: not host.sessions)


async def test_no_log_holds_the_token(caplog):
    caplog.set_level(logging.DEBUG)
    async with hosting(token="geheim") as host, session_at(host, token="geheim") as remote:
        await remote.reset(TASK, 1)
        async with session_at(host, token="verkehrt", wait_s=0.2) as other:
            with pytest.raises(HostAway) as found:
                await other.reset(TASK, 1)
    assert not [word for word in ("geheim", "verkehrt") if word in caplog.text + str(found.value)]


async def test_pages_and_tokens():
    with pytest.raises(ConfigError, match="--token"):
        EnvironmentHost(ObedientOffer(), HostSettings(host="0.0.0.0"))
    async with hosting(token="geheim") as host:
        assert await page(host, "/health") == (200, {"status": "healthy", "sessions": 0, "capacity": 64})
        for path in ("/metadata", "/schema", "/ws", "/else"):
            assert (await page(host, path))[0] == 401
            assert (await page(host, path, "falsch"))[0] == 401
        status, data = await page(host, "/metadata?token=geheim")
        assert (status, data["name"], data["version"]) == (200, "obedient", "1")
        status, data = await page(host, "/schema", "geheim")
        assert (status, sorted(data)) == (200, ["action", "observation", "state"])
        assert (await page(host, "/else", "geheim"))[0] == 404
        for token in ("", "falsch", "geheim2"):
            with pytest.raises(InvalidStatus):
                async with plain(host, token):
                    pass
        async with session_at(host, token="falsch", wait_s=0.5) as remote:
            with pytest.raises(HostAway, match="refused the token"):
                await remote.reset(TASK, 1)
        async with session_at(host, token="geheim") as remote:
            assert (await remote.reset(TASK, 1)).metadata["seed"] == 1


async def test_a_drain_lets_episodes_end_and_begins_nothing_new():
    offer = ObedientOffer()
    async with hosting(offer) as host, session_at(host) as playing, session_at(host) as slow, plain(host) as idle:
        await playing.reset(TASK, 1)
        await slow.reset(TASK, 1)
        await idle("hello", {})
        draining = asyncio.ensure_future(host.drain(grace_s=0.5))
        assert decode(await idle.connection.recv()).data["code"] == "draining"
        assert (await page(host, "/health"))[1]["status"] == "draining"
        async with plain(host) as late:
            assert (await late("reset", {})).data["code"] == "draining"
        assert (await playing.step(say("end"), "k")).terminated
        hanging = asyncio.ensure_future(slow.step(say("hang"), "k"))
        with pytest.raises(HostAway, match="drained before the episode ended"):
            await hanging
        await draining
        assert (host.sessions, host.cancelled, host.played) == (0, 1, 3)
        assert len(offer.closed) == offer.made == 2  # whoever did not begin has none


async def test_a_drain_without_sessions_ends_at_once_and_one_in_a_hurry_too():
    loop = asyncio.get_running_loop()
    async with hosting() as host:
        began = loop.time()
        await host.drain(grace_s=30.0)
        assert loop.time() - began < 5.0
    async with hosting() as host, session_at(host) as remote:
        await remote.reset(TASK, 1)
        hurry = asyncio.Event()
        draining = asyncio.ensure_future(host.drain(30.0, hurry))
        await until(lambda: host.is_draining)
        hurry.set()
        await draining
        with pytest.raises(HostAway, match="drained before"):  # told while nobody listened
            await remote.step(say("a"), "k")
        assert loop.time() - began < 10.0


@pytest.mark.parametrize("word", [*FAULTS, "hang"])
async def test_a_drain_does_not_wait_for_an_episode_that_did_not_begin(word):
    async with hosting() as host, session_at(host, wait_s=0.3 if word == "hang" else 5.0) as remote:
        with pytest.raises((EnvironmentFault, DeadlineExceeded)):
            await remote.reset(Task("t", "obedient", data={"word": word}), 1)
        began = asyncio.get_running_loop().time()
        await host.drain(grace_s=30.0)
        assert asyncio.get_running_loop().time() - began < 5.0
        assert host.cancelled == 0


class Stubborn(ObedientOffer):
    """Its first session is not built before `go`."""

    def __init__(self):
        super().__init__()
        self.go = threading.Event()
        self.asked = threading.Event()

    def session(self):
        if not self.asked.is_set():
            self.asked.set()
            self.go.wait(30.0)
        return super().session()


async def test_a_constructor_that_blocks_holds_up_its_own_session_only():  # case E11
    offer = Stubborn()
    async with hosting(offer) as host, session_at(host, wait_s=1.0) as slow, session_at(host) as quick:
        waiting = asyncio.ensure_future(slow.reset(TASK, 1))
        await until(offer.asked.is_set)
        await quick.reset(TASK, 1)
        assert (await quick.step(say("a"), "k")).metadata["echo"] == "a"
        assert (await page(host, "/health"))[0] == 200
        with pytest.raises(DeadlineExceeded, match=r"a reset took longer than 0\.\d+ s"):  # case X8
            await waiting
        assert not offer.closed
        offer.go.set()  # what is built too late is closed as well
        await until(lambda: len(offer.closed) == 1 and host.sessions == 1)


class Blocking(ObedientOffer):
    """Has no tasks before `go`, and no tools."""

    def __init__(self):
        super().__init__()
        self.go = threading.Event()

    def task(self, number):
        self.go.wait(30.0)
        return super().task(number)


async def test_tasks_that_block_hold_up_whoever_asks_for_one_only():  # case E11
    offer = Blocking()
    async with hosting(offer, call_s=0.3) as host, plain(host) as ask, session_at(host) as other:
        waiting = asyncio.ensure_future(ask("reset", {"seed": 1}))
        await other.reset(TASK, 1)
        assert "took longer than 0.3 s" in (await waiting).data["message"]
        offer.go.set()


class Exits(ObedientOffer):
    def session(self):
        raise SystemExit("no licence left")


async def test_a_constructor_that_exits_is_a_fault_of_its_session():  # case E13
    async with hosting(Exits()) as host, session_at(host) as remote:
        with pytest.raises(EnvironmentFault, match="SystemExit: no licence left") as found:
            await remote.reset(TASK, 1)
        assert found.value.transient is False
        assert (await page(host, "/health"))[0] == 200
