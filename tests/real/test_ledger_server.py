"""The embedded server: private, durable, and gone with its parent."""

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from headrace.platform.errors import LedgerAway, LedgerError, LedgerRewound
from headrace.platform.ledger.redis_ledger import RedisLedger
from headrace.platform.ledger.server import EmbeddedServer
from headrace.platform.testing.conformance.ledger_harness import LedgerHarness, limits, raises


async def _no_time(seconds: float) -> None:
    raise AssertionError(f"nothing here waits {seconds} s")


def kill(server: EmbeddedServer) -> None:
    """SIGKILL, and until it is dead."""
    os.kill(server.pid, signal.SIGKILL)
    end_s = time.monotonic() + 10
    while server.alive:
        assert time.monotonic() < end_s, "the server outlived SIGKILL by 10 s"
        time.sleep(0.005)


async def test_what_was_written_survives_a_restart(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "queue") as server:
        ledger = await RedisLedger.connect(server.url, "r", limits())
        h = LedgerHarness(ledger=ledger, run="r", advance=_no_time)
        await h.begin()
        await h.ready(0, 2)
        before = await h.stats()
        await ledger.close()
    with EmbeddedServer(tmp_path / "queue") as server:
        ledger = await RedisLedger.connect(server.url, "r", limits())
        after = await ledger.stats()
        assert after.suspect  # P8
        assert await ledger.confirm(0, "content-0")
        trusted = await ledger.stats()
        await ledger.close()
    assert (after.fates, after.head, after.groups_ready) == (before.fates, 0, 2)
    assert not trusted.suspect
    assert trusted.revision > after.revision == before.revision


async def test_a_dead_server_comes_back_at_its_address(tmp_path: Path) -> None:
    for tcp in (False, True):
        server = EmbeddedServer(tmp_path / f"queue-{tcp}", tcp=tcp)
        with pytest.raises(LedgerError, match="has not died"):
            server.restart()
        url = server.start()
        assert server.alive
        with pytest.raises(LedgerError, match="has not died"):
            server.restart()
        ledger = await RedisLedger.connect(url, "r", limits())
        h = LedgerHarness(ledger=ledger, run="r", advance=_no_time)
        await h.begin()
        assert await ledger.durable(20.0), "with a busy disk, Valkey may answer up to two seconds before it writes"
        kill(server)
        await raises(LedgerAway, ledger.stage(1))
        assert server.restart() == url
        assert server.alive
        await raises(LedgerRewound, ledger.stage(1))
        assert await ledger.confirm(0, "content-0")
        assert await ledger.stage(1) == 1
        await ledger.close()
        server.close()
        assert not server.alive


def test_a_folder_has_one_server(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path) as first:
        second = EmbeddedServer(tmp_path)
        with pytest.raises(LedgerError, match=f"pid {first.pid}"):
            second.start()
        assert first.alive
        second.close()
    with EmbeddedServer(tmp_path) as third:
        kill(third)
        third.restart()


def test_only_this_user_reaches_it(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path)
    with pytest.raises(LedgerError, match="not running"):
        _ = server.url
    socket = Path(urlsplit(server.start()).path)
    assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
    assert len(str(socket)) < 108
    assert not psutil.Process(server.pid).net_connections("tcp")
    with pytest.raises(LedgerError, match="already"):
        server.start()
    server.close()
    server.close()
    assert not socket.parent.exists()


def test_a_long_temporary_folder_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with EmbeddedServer(tmp_path / "queue") as server:
        assert len(urlsplit(server.url).path) < 108
    assert not list(long.iterdir())


def test_the_password_is_on_no_command_line(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path, tcp=True) as server:
        password = urlsplit(server.url).password or ""
        assert len(password) == 32
        assert password not in " ".join(psutil.Process(server.pid).cmdline())
        assert password not in (tmp_path / "server.log").read_text()


async def test_another_password_is_refused(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path, tcp=True) as server:
        wrong = server.url.replace(urlsplit(server.url).password or "", "wrong")
        with pytest.raises(LedgerError, match="refused the password"):
            await RedisLedger.connect(wrong, "r", limits())


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "appendonlydir").write_text("in the way")
    with pytest.raises(LedgerError, match="ended at once"):
        EmbeddedServer(tmp_path).start()


def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from headrace.platform.ledger.server import EmbeddedServer;"
        "s = EmbeddedServer(Path(sys.argv[1])); s.start(); print(s.pid, s.url, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout as stdout:
        pid, url = stdout.readline().split()
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    end_s = time.monotonic() + 10
    while psutil.pid_exists(int(pid)) and psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end_s, "the server outlived its parent by 10 s"
        time.sleep(0.02)
    socket = Path(urlsplit(url).path)
    assert not socket.exists()
    socket.parent.rmdir()
