"""The gateway's own process: who starts it, who may speak to it, how it ends, and what survives its death."""

import asyncio
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import uvloop
from gateways import GET, GRANTS, LOCAL_GRANTS, OWN, PUT, new_scope

from headrace.actors.gateway.audit.verify import verify
from headrace.actors.gateway.home import Home
from headrace.actors.gateway.policy import Mount, Policy
from headrace.actors.gateway.start import open_gateway
from headrace.platform.config.gateway import GatewayConfig
from headrace.platform.contracts import ToolOutput
from headrace.platform.errors import GatewayAway, InDoubt
from headrace.platform.records import ToolCall
from headrace.platform.testing.conformance.gateway import (
    GATEWAY_SUITE,
    SESSION_SUITE,
    GatewayContext,
    SessionContext,
    SessionGateway,
)

READ, WRITE = ToolCall("get", {"text": "a"}), ToolCall("put", {"text": "a"})
LOCAL = Policy(grants=LOCAL_GRANTS)
CONFIG = GatewayConfig(flush_s=0.05, deadline_s=30.0)


def pid_of(home: Path) -> int:
    return int((home / "pid").read_text())


def children_of(pid: int) -> str:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text()


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def gone(pid: int, within_s: float = 30.0) -> None:
    """Wait until a process that is no child of this one has ended."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(process, ended.set)
    try:
        async with asyncio.timeout(within_s):
            await ended.wait()
    finally:
        asyncio.get_running_loop().remove_reader(process)
        os.close(process)


@pytest.fixture
def home(tmp_path):
    yield tmp_path / "home"
    if (tmp_path / "home" / "pid").exists() and lives(pid := pid_of(tmp_path / "home")):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
async def client(home, tmp_path):
    made = await open_gateway(home, tmp_path / "run" / "audit", CONFIG, linger_s=1.0)
    yield made
    await made.close()


async def test_it_listens_in_a_folder_of_this_user_alone_and_is_nobodys_child(client, home):
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (home, *home.iterdir())}
    assert modes["home"] == 0o700
    assert not [name for name, mode in modes.items() if mode & 0o077]
    assert os.getsid(pid_of(home)) == pid_of(home)
    assert f" {pid_of(home)} " not in f" {children_of(os.getpid())} "


async def test_it_ends_a_while_after_its_last_connection(client, home):
    pid, address = pid_of(home), Path(Home(home).address())
    await client.close()
    await gone(pid)
    assert not address.parent.exists() and not (home / "address").exists() and not (home / "token").exists()
    assert (home / "log").read_text() == ""


async def test_a_home_that_is_open_to_others_is_refused(tmp_path):
    (tmp_path / "home").mkdir(mode=0o755)
    with pytest.raises(PermissionError, match="open to others"):
        await open_gateway(tmp_path / "home", tmp_path / "audit", CONFIG)


async def test_a_gateway_that_cannot_start_says_why(tmp_path, home):
    (tmp_path / "audit").write_text("a file")
    with pytest.raises(GatewayAway, match=r"did not start: .*audit"):
        await open_gateway(home, tmp_path / "audit", CONFIG)


def test_a_client_in_the_event_loop_of_a_ray_worker(tmp_path):
    async def ask():
        client = await open_gateway(tmp_path / "home", tmp_path / "audit", CONFIG, linger_s=0.2)
        (verdict,) = await client.session(new_scope(), LOCAL, OWN).decide((READ,), "t")
        await client.close()
        await gone(pid_of(tmp_path / "home"))
        return verdict.result

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(ask()) is None


async def test_a_copied_home_has_a_gateway_of_its_own(client, home, tmp_path):
    shutil.copytree(home, tmp_path / "copy")
    other = await open_gateway(tmp_path / "copy", tmp_path / "other", CONFIG, linger_s=0.2)
    assert pid_of(tmp_path / "copy") != pid_of(home)
    assert Home(tmp_path / "copy").address() != Home(home).address()
    await other.close()
    await gone(pid_of(tmp_path / "copy"))


async def test_a_path_that_is_too_long_for_a_socket_is_no_obstacle(tmp_path):
    home = tmp_path / ("long" * 20) / ("path" * 10) / "home"
    home.parent.mkdir(parents=True)
    client = await open_gateway(home, tmp_path / "audit", CONFIG, linger_s=0.2)
    address = Home(home).address()
    assert stat.S_IMODE(Path(address).parent.stat().st_mode) == 0o700
    assert Path(address).is_relative_to(tempfile.gettempdir())
    (verdict,) = await client.session(new_scope(), LOCAL, OWN).decide((READ,), "t")
    assert verdict.result is None
    pid = pid_of(home)
    await client.close()
    await gone(pid)
    assert not Path(address).parent.exists()


STARTER = """
import asyncio, sys
from pathlib import Path
from headrace.actors.gateway.start import open_gateway
from headrace.platform.config.gateway import GatewayConfig

async def main():
    home = Path(sys.argv[1])
    client = await open_gateway(home, home.parent / "audit", GatewayConfig(), linger_s=1.0)
    print((home / "pid").read_text().strip(), flush=True)
    sys.stdin.read()
    await client.close()

asyncio.run(main())
"""


def test_of_several_processes_one_starts_it(home, tmp_path):
    command = [sys.executable, "-c", STARTER, str(home)]
    starters = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = {starter.stdout.readline() for starter in starters}
    for starter in starters:
        starter.communicate()
        assert starter.returncode == 0
    assert said == {f"{pid_of(home)}\n"}
    assert len(list((tmp_path / "audit").iterdir())) == 1


async def test_after_sigterm_what_ran_is_finished_and_everything_is_on_disk(client, home, tmp_path):
    session = client.session(new_scope(), LOCAL, OWN)
    for number in range(20):
        await session.decide((READ,), f"t{number}")
    pid = pid_of(home)
    os.kill(pid, signal.SIGTERM)
    await gone(pid)
    (chain,) = (tmp_path / "run" / "audit").iterdir()
    assert chain.read_text().count('"decision"') >= 20
    (verdict,) = await session.decide((READ,), "again")  # by the next one
    assert verdict.result is None
    assert pid_of(home) != pid


async def test_a_killed_gateway_is_started_again_and_what_was_settled_is_known(client, home, tmp_path):  # P25, X3
    session = client.session(new_scope(), LOCAL, OWN)
    await session.decide((WRITE,), "t")
    await session.settle((ToolOutput("done"),), "t")
    await session.decide((WRITE,), "u")
    os.kill(pid_of(home), signal.SIGKILL)
    (known,) = await session.decide((WRITE,), "t")
    assert known.result.content == "done"
    with pytest.raises(InDoubt):  # its intent is on disk, its result is not
        await session.decide((WRITE,), "u")
    (read,) = await session.decide((READ,), "v")
    assert read.result is None and read.taint == ("gateway:restarted",) * bool(read.taint)
    audited = await session.close()
    assert verify(tmp_path / "run" / "audit", {"episode": audited.head}).holds


async def test_killed_under_load_no_call_is_lost_and_none_is_allowed_twice(client, home):  # X3
    async def episode(number):
        session, allowed = client.session(f"run/{number}/0#a", LOCAL, OWN), 0
        for turn in range(30):
            try:
                (verdict,) = await session.decide((WRITE if turn % 5 == 0 else READ,), f"t{turn}")
                allowed += verdict.result is None
                await session.settle((ToolOutput(f"text {turn}"),), f"t{turn}")
            except InDoubt:
                assert turn % 5 == 0
        return allowed

    async def killer():
        for _ in range(2):
            await asyncio.sleep(0.3)
            os.kill(pid_of(home), signal.SIGKILL)

    *allowed, _ = await asyncio.gather(*[episode(number) for number in range(16)], killer())
    assert min(allowed) >= 24  # reads all, writes unless in doubt


async def test_nobody_is_allowed_anything_while_it_is_away(client, home, monkeypatch):
    session = client.session(new_scope(), LOCAL, OWN)
    await session.decide((READ,), "t")
    pid = pid_of(home)
    os.kill(pid, signal.SIGSTOP)
    try:
        monkeypatch.setattr(session, "_within_s", lambda calls: 0.3)
        began = time.monotonic()
        with pytest.raises(GatewayAway, match="did not answer"):
            await session.decide((READ,), "u")
        assert time.monotonic() - began < 10
    finally:
        os.kill(pid, signal.SIGCONT)


def test_it_is_light():
    code = "import sys, headrace.actors.gateway.assembly; print(' '.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "ray", "redis", "vllm", "mcp"} & set(loaded)


# --- conformance ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SESSION_SUITE)
async def test_sessions_conform(client, name):
    policy = Policy(grants=GRANTS[:1])

    def make():
        return client.session(new_scope(), policy, (GET, PUT))

    await SESSION_SUITE[name](SessionContext(make=make, call=READ, denied=WRITE))


class Counter:
    """A web server on loopback that counts what it is asked for."""

    def __init__(self):
        self.asked = 0
        self.begun = asyncio.Event()

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/"
        return self

    async def __aexit__(self, *error):
        self._server.close()
        await self._server.wait_closed()

    async def _answer(self, reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        self.asked += 1
        body = f"answer {self.asked}".encode()
        head = (
            f"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await writer.drain()
        writer.close()


@pytest.mark.parametrize("name", GATEWAY_SUITE)
async def test_the_process_conforms_by_a_real_effect(client, name):  # X3, P25
    mounts = (Mount("http"),)
    policy = Policy(grants=GRANTS, mounts=mounts, domains=("127.0.0.1",), addresses=("127.0.0.1/32",))
    tools = await client.mounted(mounts)
    async with Counter() as counter:
        call = ToolCall(tools[0].name, {"url": counter.url, "method": "GET"})

        def make():
            return SessionGateway(client.session(new_scope(), policy, ()))

        await GATEWAY_SUITE[name](GatewayContext(make=make, call=call, effects=lambda: counter.asked))
