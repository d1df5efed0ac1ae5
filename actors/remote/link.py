"""One connection of a client to a host: a question, an answer, and an end to every wait.

A link is used for one call at a time. Whoever is cancelled or times out in a call leaves an answer that nobody reads,
so the link is of no use afterwards and `close` drops it at once. What a host said before it went away is still read.
"""

import asyncio
import contextlib
import logging
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI
from websockets.protocol import State

from headrace.actors.remote.protocol import MAX_MESSAGE, Said, decode, encode
from headrace.platform.errors import DeadlineExceeded, EnvironmentFault, HostAway

# The library's own loggers write headers down when they are verbose, and the token is one of them.
QUIET = logging.getLogger("headrace.websockets")
QUIET.setLevel(logging.WARNING)
_CLOSE_S = 2.0
# A host whose machine is gone answers no ping; then a call ends long before its own deadline.
_PING_S = 10.0
_UNAUTHORISED = 401
_TOO_BIG = 1009


class Link:
    """An open connection. Made by `open_link`."""

    def __init__(self, address: str, connection: ClientConnection) -> None:
        self.address = address
        self._connection = connection
        self._is_whole = True

    async def ask(self, kind: str, data: Any, seconds: float) -> Said:
        """Send a message and wait for the answer, whatever that is.

        Raises:
            DeadlineExceeded: there was none within `seconds` (case X8).
            HostAway: the connection is lost, or the answer is no message.
            EnvironmentFault: the message is too long for a host.
        """
        sent = encode({"type": kind, "data": data})
        if len(sent) > MAX_MESSAGE:
            raise EnvironmentFault(f"a {kind} of {len(sent)} bytes; hosts take {MAX_MESSAGE}", transient=False)
        if not self._is_whole:
            raise HostAway(f"{self.address}: the connection was given up")
        self._is_whole = False
        try:
            async with asyncio.timeout(seconds):
                with contextlib.suppress(ConnectionClosed):  # what it said before it went is still to be read
                    await self._connection.send(sent, text=True)
                answer = decode(await self._connection.recv(decode=False))
        except TimeoutError:
            raise DeadlineExceeded(f"{self.address} did not answer a {kind} within {seconds:.3g} s") from None
        except ConnectionClosed as error:
            if error.sent is not None and error.sent.code == _TOO_BIG:
                raise EnvironmentFault(f"an answer of more than {MAX_MESSAGE} bytes", transient=False) from None
            raise HostAway(f"{self.address}: the connection is lost in a {kind} ({_cause(error)})") from None
        except AttributeError:  # see `close`
            raise HostAway(f"{self.address}: the connection is lost in a {kind}") from None
        except ValueError as error:
            raise HostAway(f"{self.address} answered a {kind} with what is no message: {error}") from None
        self._is_whole = True
        return answer

    async def close(self) -> None:
        """End the connection. Safe to call twice; drops it when cancelled (case X4).

        A host that is told so ends its session first and closes then, so that its place is free when this returns;
        stock OpenEnv servers fail noisily when they are not told.
        A transport of asyncio that was closed while it still had to write cannot be aborted afterwards: it raises
        AttributeError (Python 3.11), which says that the connection is gone already.
        """
        with contextlib.suppress(AttributeError):
            try:
                if self._is_whole:
                    self._is_whole = False
                    await self._say_goodbye()
                    await self._connection.close()
            finally:
                if self._connection.state is not State.CLOSED:
                    self._connection.transport.abort()

    async def _say_goodbye(self) -> None:
        with contextlib.suppress(ConnectionClosed, TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await self._connection.send(encode({"type": "close"}), text=True)
                await self._connection.wait_closed()


async def open_link(address: str, token: str, seconds: float) -> Link:
    """Connect to a host.

    Args:
        address: as `ws://host:port`.
        token: what the host asks for, empty for none.
        seconds: how long it may take.

    Raises:
        HostAway: it cannot be reached, does not answer in time, or refuses the token.
    """
    try:
        connection = await connect(
            f"{address.rstrip('/')}/ws",
            additional_headers={"Authorization": f"Bearer {token}"} if token else None,
            open_timeout=seconds,
            close_timeout=_CLOSE_S,
            ping_interval=_PING_S,
            ping_timeout=_PING_S,
            max_size=MAX_MESSAGE,
            compression=None,
            proxy=None,
            logger=QUIET,
        )
    except InvalidStatus as error:
        code = error.response.status_code
        told = "it refused the token" if code == _UNAUTHORISED else f"it answered HTTP {code}"
        raise HostAway(f"{address}: {told}") from None
    except TimeoutError:
        raise HostAway(f"{address}: no connection within {seconds:.3g} s") from None
    except (OSError, InvalidHandshake, InvalidURI, EOFError) as error:
        raise HostAway(f"{address}: {_os_cause(error)}") from None
    return Link(address, connection)


def _cause(error: ConnectionClosed) -> str:
    if error.rcvd is not None:
        return error.rcvd.reason or f"closed with code {error.rcvd.code}"
    if error.sent is not None:
        return error.sent.reason or f"closed with code {error.sent.code}"
    return "it broke off"


def _os_cause(error: Exception) -> str:
    text = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
    return text.lower() if isinstance(error, ConnectionRefusedError) else text
