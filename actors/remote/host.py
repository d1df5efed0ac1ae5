"""A host of environments: listens, lets in, counts, and leaves in good order.

::

    process_request ─ /health /schema /metadata, 401 without the token
          │ /ws
          ▼
    _serve ─ full? draining? refused by name ─► HostSession (one for each connection)
          ▲
    drain ─ no new episodes ─ those at play go on for the grace period ─ the rest is told "cancelled" ─ closed

Whoever was told may play a new attempt elsewhere, so nothing is lost. A host knows the token of its clients and nothing
of queues or stores. It answers `/health` without the token, for whoever watches it.
"""

import asyncio
import hmac
import http
import logging
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.http11 import Request, Response

from headrace.actors.remote.host_session import HostSession, SessionLimits, refuse
from headrace.actors.remote.link import QUIET
from headrace.actors.remote.offer import Offer
from headrace.actors.remote.protocol import MAX_MESSAGE, Code, Hello
from headrace.platform.errors import ConfigError
from headrace.platform.records.message import Observation

_LEAVE_S = 5.0
_PING_S = 20.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSettings:
    """How a host is reached, and how much it takes on. `token` is what clients must show, empty for none."""

    host: str = "127.0.0.1"
    port: int = 0
    token: str = ""
    capacity: int = 64
    limits: SessionLimits = field(default_factory=SessionLimits)
    image_digest: str = ""

    def check(self) -> None:
        """Raises ConfigError for a host that anybody could use."""
        if not self.token and not _is_loopback(self.host):
            raise ConfigError(f"{self.host} can be reached from other machines: give a --token, or use 127.0.0.1")


class EnvironmentHost:
    """One host. Belongs to one event loop."""

    def __init__(self, offer: Offer, settings: HostSettings) -> None:
        settings.check()
        self._offer, self._settings = offer, settings
        self._sessions: set[HostSession] = set()
        self._server: Server | None = None
        self._left = asyncio.Event()  # set whenever a session ends
        self.port = settings.port
        self.is_draining = False
        self.played = 0
        """Sessions that there have been."""
        self.cancelled = 0
        """Sessions that were at play when the grace period was over."""

    @property
    def sessions(self) -> int:
        """How many there are now."""
        return len(self._sessions)

    async def start(self) -> None:
        """Listen. Raises OSError where the port is taken."""
        self._server = await serve(
            self._serve,
            self._settings.host,
            self._settings.port,
            process_request=self._page,
            max_size=MAX_MESSAGE,
            compression=None,
            ping_interval=_PING_S,
            ping_timeout=_PING_S,
            close_timeout=2.0,
            logger=QUIET,
        )
        self.port = next(iter(self._server.sockets)).getsockname()[1]

    def begin_drain(self) -> None:
        """Take on nothing new. What holds a connection but no episode is sent away by `drain`."""
        self.is_draining = True
        for session in self._sessions:
            session.is_draining = True

    async def drain(self, grace_s: float, hurry: asyncio.Event | None = None) -> None:
        """Let the episodes at play end for `grace_s`, or until `hurry` is set, then cancel the rest and close."""
        self.begin_drain()
        await self._send_away([each for each in self._sessions if not each.is_playing], Code.DRAINING)
        await self._wait_empty(grace_s, hurry)
        at_play = [each for each in self._sessions if each.is_playing]
        self.cancelled += len(at_play)
        await self._send_away(at_play, Code.CANCELLED)
        await self.close()

    async def close(self) -> None:
        """End every connection and every session."""
        if self._server is not None:
            self._server.close()
            try:
                async with asyncio.timeout(_LEAVE_S):
                    await self._server.wait_closed()
            except TimeoutError:
                _log.warning("%d sessions did not end in time", len(self._sessions))
        await self._offer.close()

    async def _wait_empty(self, grace_s: float, hurry: asyncio.Event | None) -> None:
        loop = asyncio.get_running_loop()
        ends = loop.time() + grace_s
        hurried = asyncio.ensure_future((hurry or asyncio.Event()).wait())
        try:
            while self._sessions and not hurried.done() and (left := ends - loop.time()) > 0:
                self._left.clear()
                leaving = asyncio.ensure_future(self._left.wait())
                await asyncio.wait({leaving, hurried}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                leaving.cancel()
        finally:
            hurried.cancel()

    async def _send_away(self, sessions: list[HostSession], code: Code) -> None:
        leaving = [asyncio.ensure_future(session.leave(code)) for session in sessions]
        if leaving:
            await asyncio.wait(leaving, timeout=_LEAVE_S)

    # --- connections --------------------------------------------------------------------------------------------------

    async def _serve(self, connection: ServerConnection) -> None:
        capacity = self._settings.capacity
        if self.is_draining:
            await refuse(connection, Code.DRAINING, "the host is draining and begins nothing new")
            return
        if len(self._sessions) >= capacity:
            await refuse(connection, Code.FULL, f"all {capacity} sessions are taken")
            return
        self.played += 1
        hello = Hello(
            environment=self._offer.name,
            version=self._offer.version,
            target=self._offer.target,
            image_digest=self._settings.image_digest,
            capacity=capacity,
            sessions=len(self._sessions) + 1,
        )
        session = HostSession(connection, self._offer, hello, self._settings.limits, str(self.played))
        self._sessions.add(session)
        try:
            await session.play()
        finally:
            self._sessions.discard(session)
            self._left.set()

    # --- pages --------------------------------------------------------------------------------------------------------

    def _page(self, connection: ServerConnection, request: Request) -> Response | None:
        """Answer a plain GET; None lets a WebSocket in."""
        try:
            url = urlsplit(request.path)
        except ValueError:
            return _json({"message": "no path"}, http.HTTPStatus.BAD_REQUEST)
        if url.path == "/health":
            return _json(self._health())
        if not self._is_allowed(request, url.query):
            return _json({"message": "give the token as `Authorization: Bearer TOKEN`"}, http.HTTPStatus.UNAUTHORIZED)
        if url.path == "/ws":
            return None
        if url.path == "/schema":
            return _json(self._schema())
        if url.path == "/metadata":
            return _json(self._metadata())
        return _json({"message": f"no page {url.path!a:.80}"}, http.HTTPStatus.NOT_FOUND)

    def _is_allowed(self, request: Request, query: str) -> bool:
        """Whether the request shows the token; compared in constant time."""
        if not self._settings.token:
            return True
        shown = request.headers.get_all("Authorization")
        given = shown[0].removeprefix("Bearer ") if shown else parse_qs(query).get("token", [""])[0]
        return hmac.compare_digest(given.encode(errors="surrogateescape"), self._settings.token.encode())

    def _health(self) -> dict[str, Any]:
        return {
            "status": "draining" if self.is_draining else "healthy",
            "sessions": len(self._sessions),
            "capacity": self._settings.capacity,
        }

    def _metadata(self) -> dict[str, Any]:
        """OpenEnv's EnvironmentMetadata."""
        return {
            "name": self._offer.name,
            "description": self._offer.description,
            "readme_content": None,
            "version": self._offer.version,
            "author": None,
            "documentation_url": None,
        }

    def _schema(self) -> dict[str, Any]:
        """OpenEnv's SchemaResponse, for a client that does not know headrace's messages."""
        (observation,), components = msgspec.json.schema_components([Observation])
        text = {"type": "string"}
        action = {"message": text, "tool": text, "arguments": {"type": "object"}, "metadata": {"type": "object"}}
        state = {"episode_id": {"type": ["string", "null"]}, "step_count": {"type": "integer"}}
        return {
            "action": {"type": "object", "properties": action, "additionalProperties": False},
            "observation": {**observation, "$defs": components},
            "state": {"type": "object", "properties": state},
        }


def _json(value: Any, status: http.HTTPStatus = http.HTTPStatus.OK) -> Response:
    body = msgspec.json.encode(value)
    headers = Headers()
    headers["Content-Type"] = "application/json"
    headers["Content-Length"] = str(len(body))
    headers["Connection"] = "close"
    return Response(status, status.phrase, headers, body)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
