"""The way to a gateway process: to the one that listens, else to one that is started now.

::

    connect ── answers ─► greeted
       │ nobody there
       ▼
    lock of the home ── held by another ─► a little later again
       │ taken
       ▼
    start a process, wait until it says that it listens ─► connect

Of several processes that want a gateway at once, one starts it, and the others find it.
"""

import asyncio
import contextlib
import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from headrace.actors.gateway.framing import Wire
from headrace.actors.gateway.home import Home
from headrace.platform.config.gateway import GatewayConfig
from headrace.platform.errors import GatewayAway

LINGER_S = 5.0
_AGAIN_S = 0.02
AnyWire = TypeVar("AnyWire", bound=Wire)


@dataclass(frozen=True, slots=True)
class Launch:
    """Which process, and how it is started where there is none."""

    home: Home
    audit: Path
    config: GatewayConfig
    linger_s: float = LINGER_S

    @property
    def command(self) -> list[str]:
        """Its command line."""
        said = {
            "--audit": self.config.audit,
            "--flush-s": self.config.flush_s,
            "--deadline-s": self.config.deadline_s,
            "--linger-s": self.linger_s,
        }
        options = [text for option, value in said.items() for text in (option, str(value))]
        module = "headrace.actors.gateway.process"
        return [sys.executable, "-m", module, str(self.home.path), str(self.audit.absolute()), *options]


async def connect(launch: Launch, make: Callable[[], AnyWire]) -> AnyWire:
    """A connection to the gateway, which is started where there is none. Takes as long as it takes.

    Raises:
        GatewayAway: it cannot be started; the message says why.
        OSError: its home is not what it has to be.
    """
    loop = asyncio.get_running_loop()
    while True:
        try:
            _, wire = await loop.create_unix_connection(make, launch.home.address())
            return wire
        except (FileNotFoundError, ConnectionError):
            pass
        async with _starting(launch.home) as ours:
            if not ours:
                await asyncio.sleep(_AGAIN_S)
            elif not _listens(launch.home):
                await _start(launch)


@contextlib.asynccontextmanager
async def _starting(home: Home) -> AsyncIterator[bool]:
    """Whether it is ours to start a process."""
    file = os.open(home.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(file)


def _listens(home: Home) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(home.address())
        except OSError:
            return False
    return True


async def _start(launch: Launch) -> None:
    """Start one and wait until it listens. What is waited for is not it, but a forerunner that then ends."""
    forerunner = _spawn(launch.command)
    try:
        _, told = await asyncio.to_thread(forerunner.communicate)
    except asyncio.CancelledError:
        forerunner.kill()
        raise
    if forerunner.returncode != 0:
        why = told.decode(errors="replace").strip() or f"exit code {forerunner.returncode}"
        raise GatewayAway(f"the gateway did not start: {why}")


def _spawn(command: list[str]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
