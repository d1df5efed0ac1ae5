"""The one call by which a worker gets to the gateway of its node."""

from pathlib import Path

from headrace.actors.gateway.client import GatewayClient
from headrace.actors.gateway.home import Home
from headrace.actors.gateway.launch import LINGER_S, Launch
from headrace.platform.config.gateway import GatewayConfig


async def open_gateway(home: Path, audit: Path, config: GatewayConfig, *, linger_s: float = LINGER_S) -> GatewayClient:
    """A client of the gateway process that lives in `home`, which is started where there is none.

    Args:
        home: a folder on this node, of this user alone.
        audit: the folder of the run's audit chains.
        config: of the process, should it be started.
        linger_s: how long that outlives its last connection.

    Raises:
        GatewayAway: it cannot be started.
        PermissionError: `home` is open to others.
    """
    client = GatewayClient(Launch(Home(home), audit, config, linger_s))
    await client.up()
    return client
