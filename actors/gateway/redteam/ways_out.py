"""The ways out of a gateway that is under attack: both lead to one unix socket, behind which `outside.py` answers.

Also the watch over this process: a connection to any address but loopback, and a question to any name server, raises
before it is made, and is written down. The watch does not trust the connector; it sees every socket of the process.
"""

import asyncio
import ipaddress
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from headrace.actors.gateway.perform.connector import Streams

_TO_ADDRESSES = ("socket.connect", "socket.sendto", "socket.sendmsg")
_TO_NAMES = ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr")


class RecordedWays:
    """Connector and resolver; `address` is the socket of `Outside`."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def connect(self, address: str, port: int) -> Streams:
        """See `Connector`: the other end answers for the host."""
        return await self._ask({"dial": address, "port": port})

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        """See `Resolver`."""
        reader, writer = await self._ask({"resolve": host})
        try:
            answer: list[str] = json.loads(await reader.readline())
        finally:
            writer.close()
        return answer

    async def _ask(self, message: dict[str, Any]) -> Streams:
        reader, writer = await asyncio.open_unix_connection(self._address)
        writer.write(json.dumps(message).encode() + b"\n")
        return reader, writer


def keep_on_loopback(tell: Callable[[str], None]) -> None:
    """From now on this process connects to loopback and to unix sockets only; `tell` hears of what it tried.

    For the life of the process: an audit hook cannot be taken out.
    """

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        tried = ""
        if event in _TO_ADDRESSES:
            tried = _beyond(arguments[1])
        elif event in _TO_NAMES:
            tried = _beyond((arguments[0],))
        if tried:
            tell(f"{event} {tried}")
            raise PermissionError(f"{event} {tried}: nothing leaves this host here")

    sys.addaudithook(watch)


def _beyond(address: Any) -> str:
    """The host of a socket's address, empty where it is this host."""
    if not isinstance(address, tuple) or not address:  # a unix socket, or a netlink one
        return ""
    host = address[0].decode() if isinstance(address[0], bytes) else str(address[0] or "127.0.0.1")
    try:
        return "" if ipaddress.ip_address(host.partition("%")[0]).is_loopback else host
    except ValueError:
        return "" if host == "localhost" else host
