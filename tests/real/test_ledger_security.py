"""A server that others use too: TLS with verification, users, databases, and an ACL that knows one run only."""

import datetime
import ipaddress
import re
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError

from headrace.platform.errors import HeadraceError, LedgerError
from headrace.platform.ledger.redis_ledger import RedisLedger
from headrace.platform.ledger.server import EmbeddedServer
from headrace.platform.registry.redis_pins import RedisPins
from headrace.platform.testing.conformance.ledger_harness import LedgerHarness, limits

SECRET = "p@ss/marked-secret"
QUOTED = "p%40ss%2Fmarked-secret"
ROOT = Path(__file__).resolve().parents[2]
PAGE, SCRIPTS = ROOT / "docs" / "server.md", ROOT / "platform" / "ledger" / "lua"


async def _no_time(seconds: float) -> None:
    raise AssertionError(f"nothing here waits {seconds} s")


@asynccontextmanager
async def connected(url: str, run: str = "mine") -> AsyncIterator[LedgerHarness]:
    ledger = await RedisLedger.connect(url, run, limits(), connect_deadline_s=2.0)
    yield LedgerHarness(ledger=ledger, run=run, advance=_no_time)
    await ledger.close()


async def play(h: LedgerHarness) -> None:
    """Every call of the ledger once, on the way that a run goes."""
    ledger = h.ledger
    fence = await h.begin()
    assert await ledger.watch_head(0, 0.05) == 0
    await ledger.allow("lookup", ["1"])
    tickets = await h.admit(0, 3)
    assert await ledger.renew("worker", [ticket.group for ticket in tickets]) == []
    await h.finish(tickets[:2])
    await h.put(h.failed(2, 0), h.failed(2, 1, retryable=False))
    await ledger.disown("worker")
    assert len(await ledger.lease(fence, 0, 0, 2)) == 2
    await ledger.extend(fence, [0, 1])
    await ledger.release(fence, [0, 1])
    leased = await ledger.lease(fence, 0, 0, 2)
    assert [bool(member.payload) for group in leased for member in group.members] == [True] * 4
    await ledger.at_risk(fence, 0, 0, 1)
    await h.publish(fence, 0, leased)
    await ledger.settle(fence, 1)
    await h.ready(1, 2)
    await ledger.drop(fence, [group.group for group in await ledger.lease(fence, 1, 0, 1)], "fidelity")
    await ledger.rollback(fence, 1)
    await ledger.durable(2.0)
    await ledger.stop("enough")
    assert (await h.stats()).holds
    rows, _ = await ledger.fates(0, 100)
    assert {row.fate for row in rows} >= {"trained", "dropped"}


# --- TLS --------------------------------------------------------------------------------------------------------------


class Authority:
    """A throw-away certificate authority with one certificate for the loopback address."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.ca, self.certificate, self.key = folder / "ca.pem", folder / "server.pem", folder / "server.key"
        own_key, server_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"authority of {folder.name}")])
        ca = self._built(name, name, own_key, own_key, x509.BasicConstraints(ca=True, path_length=0))
        address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "server")])
        self.ca.write_bytes(ca.public_bytes(serialization.Encoding.PEM))
        self.certificate.write_bytes(
            self._built(subject, name, server_key, own_key, address).public_bytes(serialization.Encoding.PEM)
        )
        self.key.write_bytes(
            server_key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )

    @staticmethod
    def _built(
        subject: x509.Name,
        issuer: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        signer: ec.EllipticCurvePrivateKey,
        extension: x509.ExtensionType,
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder(subject_name=subject, issuer_name=issuer, public_key=key.public_key())
        builder = builder.serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - datetime.timedelta(hours=1))
        builder = builder.not_valid_after(now + datetime.timedelta(hours=1))
        return builder.add_extension(extension, critical=True).sign(signer, hashes.SHA256())


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority") / "right")


@pytest.fixture(scope="module")
def address(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Host and port of a server that speaks TLS only and knows the user `runner`."""
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("redis-server is not installed, and the embedded server speaks no TLS")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    lines = (
        f"dir {tmp_path_factory.mktemp('tls')}",
        "bind 127.0.0.1",
        "port 0",
        f"tls-port {port}",
        f"tls-cert-file {authority.certificate}",
        f"tls-key-file {authority.key}",
        f"tls-ca-cert-file {authority.ca}",
        "tls-auth-clients no",
        'save ""',
        "appendonly yes",
        "user default off",
        f"user runner on >{SECRET} ~* &* +@all",
    )
    with running([binary, "-"], "\n".join(lines), port):
        yield f"127.0.0.1:{port}"


@contextmanager
def running(command: list[str], configuration: str, port: int) -> Iterator[None]:
    """A server with this configuration, from when it listens."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert process.stdin is not None
    with process.stdin as stdin:
        stdin.write(configuration.encode())
    try:
        end_s = time.monotonic() + 10
        while not listens(port):
            assert process.poll() is None, "the server ended at once"
            assert time.monotonic() < end_s, "the server does not listen after 10 s"
        yield
    finally:
        process.terminate()
        process.wait(10)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def test_a_run_over_tls_with_user_password_and_database(address: str, authority: Authority) -> None:
    url = f"rediss://runner:{QUOTED}@{address}/3?ssl_ca_certs={authority.ca}"
    async with connected(url) as h:
        await play(h)
    client = Redis.from_url(url)
    assert await client.exists("{mine}:meta") == 1
    await client.select(0)
    assert await client.dbsize() == 0
    await client.aclose()
    await client.connection_pool.disconnect()


async def refusal(url: str) -> str:
    """Why a ledger was not to be had; nothing that is shown has the password."""
    with pytest.raises(HeadraceError) as caught:
        await RedisLedger.connect(url, "mine", limits(), connect_deadline_s=1.0)
    shown = f"{caught.value} {caught.value.__cause__}"
    assert "marked-secret" not in shown
    assert "runner" not in shown
    return str(caught.value)


async def test_a_server_with_a_certificate_of_somebody_else_is_refused(address: str, tmp_path: Path) -> None:
    other = Authority(tmp_path / "wrong").ca
    text = await refusal(f"rediss://runner:{QUOTED}@{address}/0?ssl_ca_certs={other}")
    assert f"rediss://{address}/0" in text
    assert "certificate verify failed" in text
    assert "certificate verify failed" in await refusal(f"rediss://runner:{QUOTED}@{address}/0")


async def test_a_certificate_for_another_host_is_refused(address: str, authority: Authority) -> None:
    port = address.rpartition(":")[2]
    text = await refusal(f"rediss://runner:{QUOTED}@localhost:{port}/0?ssl_ca_certs={authority.ca}")
    assert "certificate is not valid for 'localhost'" in text


async def test_no_word_in_the_clear(address: str) -> None:
    assert address in await refusal(f"redis://runner:{QUOTED}@{address}/0")


async def test_wrong_password_or_user(address: str, authority: Authority) -> None:
    for login in (f"runner:{QUOTED}x", f"runner2:{QUOTED}", f":{QUOTED}"):
        text = await refusal(f"rediss://{login}@{address}/0?ssl_ca_certs={authority.ca}")
        assert "refused the password" in text


# --- ACL --------------------------------------------------------------------------------------------------------------


def documented_rule(run: str) -> list[str]:
    """The rule of docs/server.md for `run`, as arguments after ACL SETUSER NAME."""
    found = re.search(r"^ACL SETUSER NAME (.*?)\n```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert found is not None, "docs/server.md has no ACL"
    return found[1].replace("RUN", run).replace("PASSWORD", "own-password").replace("\\\n", " ").split()


def test_the_documented_rule_names_what_clients_and_scripts_call_and_no_more() -> None:
    sent = {"ping", "info", "script|load", "multi", "mset", "evalsha", "exec", "mget", "xrevrange", "xread"}
    scripts = "".join(path.read_text("utf-8") for path in SCRIPTS.glob("*.lua"))
    called = {name.lower() for name in re.findall(r"(?:call|many)\('([A-Z]+)'", scripts)}
    assert {word[1:] for word in documented_rule("mine") if word.startswith("+")} == sent | called


@pytest.fixture(scope="module", params=["valkey", "redis"])
def admin_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    binary = shutil.which("redis-server") if request.param == "redis" else None
    if request.param == "redis" and binary is None:
        pytest.skip("redis-server is not installed")
    with EmbeddedServer(tmp_path_factory.mktemp("acl"), tcp=True, binary=binary and Path(binary)) as server:
        yield server.url


@pytest.fixture
async def own_url(admin_url: str) -> AsyncIterator[str]:
    """The same server as a user who has exactly the documented rule for the run `mine`."""
    admin = Redis.from_url(admin_url)
    await admin.flushall()
    await admin.execute_command("ACL", "SETUSER", "owner", *documented_rule("mine"))
    yield re.sub(r"//.*@", "//owner:own-password@", admin_url)
    await admin.execute_command("ACL", "DELUSER", "owner")
    await admin.aclose()


async def test_the_documented_rule_is_enough_for_a_whole_run(own_url: str) -> None:
    async with connected(own_url) as h:
        await play(h)
    pins = await RedisPins.connect(own_url, "mine")
    assert await pins.pin(1, "replica-0", 10.0)
    assert not await pins.retire(1)
    await pins.unpin(1, "replica-0")
    assert await pins.retire(1)
    await pins.close()


async def test_what_is_on_disk_is_known_where_the_user_may_ask(admin_url: str, own_url: str) -> None:  # P11
    admin = Redis.from_url(admin_url)
    waits = "valkey_version" in await admin.info("server")
    async with connected(own_url) as h:
        await h.begin()
        assert not await h.ledger.durable(2.0)
        await admin.execute_command("ACL", "SETUSER", "owner", "+waitaof" if waits else "+config|get")
        assert await h.ledger.durable(2.0) is waits
        await admin.config_set("appendfsync", "always")
        assert await h.ledger.durable(2.0)
        await admin.config_set("appendfsync", "everysec")
    await admin.aclose()


async def test_another_run_and_the_server_itself_are_out_of_reach(admin_url: str, own_url: str) -> None:
    async with connected(admin_url, "theirs") as h:
        await h.begin()
    with pytest.raises(LedgerError, match=r"(?i)permission"):
        await RedisLedger.connect(own_url, "theirs", limits())
    client = Redis.from_url(own_url)
    for command in (
        ("GET", "{theirs}:meta"),
        ("DEL", "{theirs}:meta"),
        ("SET", "mine", "x"),
        ("EVAL", "return redis.call('DEL', '{theirs}:meta')", "0"),
        ("CONFIG", "SET", "maxmemory", "1"),
        ("FLUSHALL",),
        ("FLUSHDB",),
        ("KEYS", "*"),
        ("SHUTDOWN",),
        ("ACL", "LIST"),
        ("SCRIPT", "FLUSH"),
        ("PUBLISH", "c", "x"),
    ):
        with pytest.raises(NoPermissionError):
            await client.execute_command(*command)
    await client.aclose()
    async with connected(admin_url, "theirs") as h:
        assert (await h.stats()).head == 0
