"""The two ways out of the gateway: names become addresses, and addresses become connections.

Both are handed in, so that a test can record what would have been reached without reaching it.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeAlias

Resolver: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]
"""Host name and port to network addresses, in the order in which they are tried; OSError where there are none."""
Streams: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Connector(Protocol):
    """Opens connections to addresses; never looks a name up."""

    async def connect(self, address: str, port: int) -> Streams:
        """A connection to a network address. Raises OSError."""


Ways: TypeAlias = tuple[Connector, Resolver]
"""Both."""


class DirectConnector:
    """Dials what it is told."""

    async def connect(self, address: str, port: int) -> Streams:
        """See `Connector`."""
        return await asyncio.open_connection(address, port, flags=socket.AI_NUMERICHOST)


async def resolve_name(host: str, port: int) -> Sequence[str]:
    """The addresses of a host, as the system knows them. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(each[4][0]) for each in found))
