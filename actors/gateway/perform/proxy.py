"""The proxy on loopback through which the gateway's own tools reach the network.

::

    tool ── CONNECT host:port, or an absolute URL, with the episode's credential ─► who is it? ► may it go there?
                                                                                        │
         ◄── bytes both ways, bounded in number and time ── dial that very address ◄── resolve once, check every address

A name is resolved once, and what was checked is what is dialled: a second answer of the name server is never asked for.
A name with any address that may not be reached is refused whole. One request a connection; what one asks for here is
read by h11 and written anew, so that two programs cannot read it in two ways. A refusal has its reason in the reason
phrase, and a `Proxy-Status` header with a word that no other host knows. Inside of a tunnel the proxy sees nothing, and
need not: it leads to that host.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import h11

from headrace.actors.gateway.decisions.addresses import Place, place_of
from headrace.actors.gateway.perform.connector import Connector, Resolver, Streams
from headrace.actors.gateway.perform.permits import Permit, Permits
from headrace.platform.errors import ConfigError

_log = logging.getLogger(__name__)
_CHUNK = 65536
_HOP_BY_HOP = frozenset((b"connection", b"keep-alive", b"te", b"trailer", b"upgrade", b"expect", b"host"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyLimits:
    """Of one connection: seconds, and bytes in either direction; `connections` is at once and episode."""

    head_s: float = 10.0
    connect_s: float = 10.0
    total_s: float = 120.0
    sent_bytes: int = 8 * 1024 * 1024
    received_bytes: int = 64 * 1024 * 1024
    head_bytes: int = 64 * 1024
    connections: int = 16


class _Refusal(Exception):
    """The request is answered with a status and a reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


@dataclass(slots=True)
class _Client:
    """A connection to the proxy, and what was read of it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    parser: h11.Connection
    sent: int = 0
    """Bytes that went on to the other side."""
    upstream: asyncio.StreamWriter | None = None

    def close(self) -> None:
        """Now, from either side."""
        self.writer.transport.abort()
        if self.upstream is not None:
            self.upstream.transport.abort()


class EgressProxy:
    """The proxy of a gateway process; listens from `start` on, on a port of loopback that the system chooses.

    Args:
        connector: opens connections to addresses.
        resolver: looks names up.
        limits: of each connection.
    """

    def __init__(self, connector: Connector, resolver: Resolver, limits: ProxyLimits | None = None) -> None:
        self._connector, self._resolver = connector, resolver
        self._limits = limits or ProxyLimits()
        self.permits = Permits()
        self.mark = f"headrace; error={secrets.token_hex(12)}"
        """The `Proxy-Status` of a refusal; whoever is asked through the proxy cannot say it."""
        self._server: asyncio.Server | None = None
        self._starting = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Where it listens. It was started."""
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def start(self) -> None:
        """Listen, if it does not yet."""
        async with self._starting:
            if self._server is None:
                self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=_CHUNK)

    async def close(self) -> None:
        """End all connections and listen no more. Safe to call twice."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if server is not None:
            await server.wait_closed()

    # --- one connection -----------------------------------------------------------------------------------------------

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        parser = h11.Connection(h11.SERVER, max_incomplete_event_size=self._limits.head_bytes)
        task = asyncio.get_running_loop().create_task(self._serve(_Client(reader, writer, parser)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, client: _Client) -> None:
        try:
            await self._answer(client)
        except (OSError, TimeoutError, h11.ProtocolError) as error:
            _log.debug("a connection through the proxy ended: %s", error)
        except Exception:
            _log.exception("a connection through the proxy failed")  # fail closed: it is closed below
        finally:
            client.close()

    async def _answer(self, client: _Client) -> None:
        try:
            async with asyncio.timeout(self._limits.head_s):
                request = await self._request(client)
            credential, permit = self._holder(request)
            place = _target(request)
        except _Refusal as refusal:
            await self._refuse(client, refusal)
            return
        except (TimeoutError, h11.RemoteProtocolError):
            await self._refuse(client, _Refusal(400, "that is no request"))
            return
        if not self.permits.connected(credential, client.close, self._limits.connections):
            await self._refuse(client, _Refusal(503, "too many connections at once"))
            return
        try:
            async with asyncio.timeout(min(self._limits.total_s, self.permits.left_s(permit))):
                try:
                    reader, client.upstream = await self._dial(place, permit)
                except _Refusal as refusal:
                    await self._refuse(client, refusal)
                    return
                if request.method == b"CONNECT":
                    await self._tunnel(client, reader, client.upstream)
                else:
                    await self._forward(client, request, place, reader, client.upstream)
        finally:
            self.permits.disconnected(credential, client.close)

    async def _request(self, client: _Client) -> h11.Request:
        while True:
            event = client.parser.next_event()
            if isinstance(event, h11.Request):
                return event
            if event is h11.NEED_DATA:
                client.parser.receive_data(await client.reader.read(_CHUNK))
            else:
                raise _Refusal(400, "that is no request")

    def _holder(self, request: h11.Request) -> tuple[str, Permit]:
        shown = [value for name, value in request.headers if name == b"proxy-authorization"]
        found = self.permits.find(shown[0].decode("latin-1")) if len(shown) == 1 else None
        if found is None:
            raise _Refusal(407, "no episode has this credential")
        return found

    async def _dial(self, place: Place, permit: Permit) -> Streams:
        """A connection to a place, by an address that was checked. Raises _Refusal."""
        if told := permit.problem(place):
            raise _Refusal(403, told)
        try:
            async with asyncio.timeout(self._limits.connect_s):
                addresses = [place.address] if place.address else await self._resolver(place.host, place.port)
                if not addresses or not all(permit.may_dial(each) for each in addresses):
                    raise _Refusal(403, f"{place.shown} has an address that may not be reached")
                return await self._first(addresses, place)
        except TimeoutError:
            raise _Refusal(504, f"{place.shown} did not answer in time") from None
        except OSError:
            raise _Refusal(502, f"{place.shown} cannot be reached") from None
        except ConfigError as error:
            raise _Refusal(403, str(error)) from None

    async def _first(self, addresses: Sequence[str], place: Place) -> Streams:
        for each in addresses[:-1]:
            with contextlib.suppress(OSError):
                return await self._connector.connect(each, place.port)
        return await self._connector.connect(addresses[-1], place.port)

    async def _refuse(self, client: _Client, refusal: _Refusal) -> None:
        reason = refusal.reason.encode("ascii", "replace").decode()[:300]
        challenge = "Proxy-Authenticate: Basic\r\n" if refusal.status == 407 else ""
        head = f"HTTP/1.1 {refusal.status} {reason}\r\nProxy-Status: {self.mark}\r\n{challenge}"
        client.writer.write(f"{head}Content-Length: 0\r\nConnection: close\r\n\r\n".encode())
        await client.writer.drain()
        client.writer.close()
        await client.writer.wait_closed()

    # --- bytes --------------------------------------------------------------------------------------------------------

    async def _tunnel(self, client: _Client, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client.writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await self._send(client, writer, client.parser.trailing_data[0])
        await _either(self._up(client, writer), self._down(client, reader))

    async def _forward(
        self,
        client: _Client,
        request: h11.Request,
        place: Place,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Write the one request anew, with its body, and carry the answer back until the other side closes."""
        out = h11.Connection(h11.CLIENT)
        await self._send(client, writer, out.send(_rewritten(request, place)))

        async def up() -> None:
            while True:
                event = client.parser.next_event()
                if event is h11.NEED_DATA:
                    client.parser.receive_data(await client.reader.read(_CHUNK))
                elif isinstance(event, h11.Data):
                    await self._send(client, writer, out.send(event))
                elif isinstance(event, h11.EndOfMessage):
                    await self._send(client, writer, out.send(h11.EndOfMessage()))
                    break
                else:
                    return
            await client.reader.read(1)  # nothing more is taken: it closes, or it is closed

        await _either(up(), self._down(client, reader))

    async def _up(self, client: _Client, writer: asyncio.StreamWriter) -> None:
        while data := await client.reader.read(_CHUNK):
            await self._send(client, writer, data)

    async def _send(self, client: _Client, writer: asyncio.StreamWriter, data: bytes | None) -> None:
        if not data:
            return
        client.sent += len(data)
        if client.sent > self._limits.sent_bytes:
            raise ConnectionError("more was sent than may be")
        writer.write(data)
        await writer.drain()

    async def _down(self, client: _Client, reader: asyncio.StreamReader) -> None:
        left = self._limits.received_bytes
        while left > 0 and (data := await reader.read(min(_CHUNK, left))):
            left -= len(data)
            client.writer.write(data)
            await client.writer.drain()
        if left > 0:  # all that came is given out before the connection is closed
            client.writer.write_eof()
            await client.writer.drain()
            client.writer.close()
            await client.writer.wait_closed()


def _target(request: h11.Request) -> Place:
    """Where a request leads. Raises _Refusal."""
    target = request.target.decode("latin-1")
    try:
        if request.method == b"CONNECT":
            host, colon, port = target.rpartition(":")
            if not (host and colon and port.isascii() and port.isdigit()) or any(sign in host for sign in "/?#@"):
                raise ValueError("CONNECT needs HOST:PORT")
            if ":" in host and not host.startswith("["):  # our client leaves the brackets out; the port is always there
                host = f"[{host}]"
            return place_of(f"https://{host}:{port}/")
        if not target.startswith("http://"):
            raise ValueError("only http:// URLs and tunnels go through this proxy")
        return place_of(target)
    except ValueError as error:
        raise _Refusal(400, str(error)) from None


def _rewritten(request: h11.Request, place: Place) -> h11.Request:
    """A request as the other side gets it: one line, one host, nothing that was meant for the proxy."""
    rest = request.target.split(b"//", 1)[1]
    path = rest[min([at for at in (rest.find(b"/"), rest.find(b"?"), rest.find(b"#")) if at >= 0] or [len(rest)]) :]
    host = f"[{place.address}]" if ":" in place.address else place.shown
    host += "" if place.port == 80 else f":{place.port}"
    kept = [
        (name, value) for name, value in request.headers if name not in _HOP_BY_HOP and not name.startswith(b"proxy-")
    ]
    return h11.Request(
        method=request.method,
        target=(path if path.startswith(b"/") else b"/" + path).partition(b"#")[0],
        headers=[(b"host", host.encode()), *kept, (b"connection", b"close")],
    )


async def _either(*directions: Coroutine[Any, Any, None]) -> None:
    """Until one of them is over. Raises what it raised."""
    tasks = [asyncio.ensure_future(each) for each in directions]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
