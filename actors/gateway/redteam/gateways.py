"""Gateway processes for attacks: how one is started and ended, and where it is."""

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.actors.gateway.client import GatewayClient
from headrace.actors.gateway.home import Home
from headrace.actors.gateway.launch import Launch
from headrace.actors.gateway.redteam.process import SETTING, TRIED
from headrace.platform.config.gateway import GatewayConfig

DEADLINE_S = 4.0
"""Of decisions and of tools."""
_MODULE = "headrace.actors.gateway.redteam.process"
_LINGER_S = 5.0
_END_S = 15.0


class _Launch(Launch):
    """The same command line, of a process whose ways out are recorded."""

    @property
    def command(self) -> list[str]:
        """See `Launch`."""
        return [sys.executable, "-m", _MODULE, *super().command[3:]]


@dataclass(frozen=True, slots=True)
class RunningGateway:
    """One process, and a client of it."""

    client: GatewayClient
    home: Path
    audit: Path

    @property
    def pid(self) -> int:
        """Its number; of the one that lives now."""
        return int((self.home / "pid").read_text(encoding="ascii"))

    @property
    def address(self) -> str:
        """Its socket."""
        return Home(self.home).address()

    @property
    def tried(self) -> list[str]:
        """What it would have connected to beside loopback, had it been let."""
        log = self.home / TRIED
        return log.read_text(encoding="utf-8").splitlines() if log.exists() else []

    async def close(self) -> None:
        """End it, and wait until it is gone. Raises TimeoutError."""
        await self.client.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        with (self.home / "pid").open("rb+") as held:
            async with asyncio.timeout(_END_S):
                while not _is_free(held.fileno()):  # noqa: ASYNC110 - it is a lock
                    await asyncio.sleep(0.02)


async def start_gateway(folder: Path, outside: Path, env: Mapping[str, str]) -> RunningGateway:
    """A gateway of its own in `folder`.

    Args:
        folder: gets its home and its audit.
        outside: the socket of `Outside`.
        env: what the process finds in its environment.

    Raises:
        GatewayAway: it does not start.
    """
    home, audit = folder / "home", folder / "audit"
    made = Home(home)
    (home / SETTING).write_text(json.dumps({"address": str(outside), "env": dict(env)}), encoding="utf-8")
    client = GatewayClient(_Launch(made, audit, GatewayConfig(deadline_s=DEADLINE_S), _LINGER_S))
    await client.up()
    return RunningGateway(client, home, audit)


def _is_free(file: int) -> bool:
    """Whether no process has this home any more."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
