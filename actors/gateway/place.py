"""Where the gateway of a run lives on a node, and the one of a process that belongs to no run."""

import atexit
import functools
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from headrace.platform.config.gateway import GatewayConfig


@dataclass(frozen=True, slots=True)
class GatewayPlace:
    """`home` is the gateway's own folder on this node (socket, token, journal, approvals), `audit` that of its chains.

    Processes that name the same place share one gateway, which ends `linger_s` after the last of them has hung up.
    """

    home: Path
    audit: Path
    config: GatewayConfig = field(default_factory=GatewayConfig)
    linger_s: float = 5.0


@functools.cache
def private_place() -> GatewayPlace:
    """That of this process, for whatever is played outside of a run; its folder goes when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="headrace-gateway-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return GatewayPlace(folder / "home", folder / "audit")
