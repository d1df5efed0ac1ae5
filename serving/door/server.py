"""The server of the token door: listens, and knows its connections. What a client may do is in `session.py`, what
becomes of its requests in `desk.py`."""

import asyncio
import logging
import secrets
from collections import Counter

from headrace.platform.contracts import TokenGenerator
from headrace.platform.errors import ConfigError
from headrace.serving.door.desk import Desk
from headrace.serving.door.handshake import DoorRefused, RefusalReason, ServerHandshake
from headrace.serving.door.messages import Versions
from headrace.serving.door.session import Session

_CLOSE_GRACE_S = 1.0
_BACKLOG = 1024
_log = logging.getLogger(__name__)


class DoorServer:
    """Serves one engine to any number of clients that hold the token.

    Args:
        engine: what answers; its lifetime is the caller's.
        token: the shared secret.
        replica: this engine's name, told to every client.
        host, port: where to listen; port 0 takes a free one.
        handshake_deadline_s: a peer that has not proved itself by then is cut off.
        stall_deadline_s: so is a client that reads nothing for this long while replies wait for it.
        grace_s: how long what a lost client had asked goes on, for it to come back (P24).
    """

    def __init__(
        self,
        engine: TokenGenerator,
        token: str,
        replica: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        handshake_deadline_s: float = 5.0,
        stall_deadline_s: float = 60.0,
        grace_s: float = 10.0,
    ) -> None:
        if not token:
            raise ConfigError("the token door needs a token")
        self._engine = engine
        self._token = token
        self.replica = replica
        self._host = host
        self.port = port
        self.handshake_deadline_s = handshake_deadline_s
        self.stall_deadline_s = stall_deadline_s
        self._instance = secrets.token_hex(8)
        self._desk = Desk(engine, replica, grace_s)
        self._listener: asyncio.Server | None = None
        self._connections: set[Session] = set()
        self.refused: Counter[RefusalReason] = Counter()

    async def start(self) -> tuple[str, int]:
        """Listen; returns host and port. Raises OSError when the address cannot be had."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._session, self._host, self.port, backlog=_BACKLOG)
        host, port = self._listener.sockets[0].getsockname()[:2]
        self.port = int(port)
        return str(host), self.port

    def announcement(self) -> Versions:
        """What can be asked for, as clients are told."""
        return Versions(tuple(self._engine.versions()), self._desk.is_draining)

    @property
    def open_requests(self) -> int:
        """Requests that are running, of all clients."""
        return self._desk.running

    @property
    def kept_results(self) -> int:
        """Results that their clients have not acknowledged yet (P24)."""
        return self._desk.kept

    @property
    def sessions(self) -> int:
        """Sessions that have asked for something and were not released."""
        return self._desk.sessions

    @property
    def is_draining(self) -> bool:
        """Whether new sessions are to go elsewhere."""
        return self._desk.is_draining

    def announce_versions(self) -> None:
        """Push what the engine holds to every client. To be called after each load and retire."""
        announcement = self.announcement()
        for connection in self._connections:
            connection.announce(announcement)

    def drain(self, grace_s: float, for_good: bool = False) -> None:
        """Finish the sessions that are here, and take no new one after `grace_s`; clients are told at once."""
        self._desk.drain(grace_s, for_good)
        self.announce_versions()

    def reopen(self) -> None:
        """Take new sessions again, unless it drains for good; clients are told, and what the engine holds with it."""
        self._desk.reopen()
        self.announce_versions()

    async def close(self, why: str = "it was closed") -> None:
        """Stop listening, cancel what runs, and part from every client for good. Safe to call twice."""
        if self._listener is not None:
            self._listener.close()
        self._desk.close()
        connections = list(self._connections)
        for connection in connections:
            connection.end(why)
        if connections:
            await asyncio.wait([connection.gone for connection in connections], timeout=_CLOSE_GRACE_S)
        for connection in self._connections.copy():
            connection.abort()
        if self._listener is not None:
            await self._listener.wait_closed()

    # --- called by connections ----------------------------------------------------------------------------------------

    def _session(self) -> Session:
        session = Session(self, self._desk, ServerHandshake(self._token, self.replica, instance=self._instance))
        self._connections.add(session)
        return session

    def left(self, session: Session) -> None:
        """A connection is gone."""
        self._connections.discard(session)

    def count_refusal(self, error: DoorRefused) -> None:
        """A peer failed its handshake."""
        self.refused[error.reason] += 1
        _log.warning("door %s: refused a peer: %s", self.replica, error)
