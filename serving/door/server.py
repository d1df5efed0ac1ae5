"""The server of the token door: listens, and knows its sessions. What a client may do is in `session.py`."""

import asyncio
import logging
from collections import Counter

from headrace.platform.contracts import TokenGenerator
from headrace.platform.errors import ConfigError
from headrace.serving.door.handshake import DoorRefused, RefusalReason, ServerHandshake
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
        self._listener: asyncio.Server | None = None
        self._sessions: set[Session] = set()
        self.refused: Counter[RefusalReason] = Counter()

    async def start(self) -> tuple[str, int]:
        """Listen; returns host and port. Raises OSError when the address cannot be had."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._session, self._host, self.port, backlog=_BACKLOG)
        host, port = self._listener.sockets[0].getsockname()[:2]
        self.port = int(port)
        return str(host), self.port

    def versions(self) -> tuple[int, ...]:
        """What the engine holds, oldest first."""
        return tuple(self._engine.versions())

    @property
    def open_requests(self) -> int:
        """Requests that are running, of all clients."""
        return sum(session.open_requests for session in self._sessions)

    def announce_versions(self) -> None:
        """Push what the engine holds to every client. To be called after each load and retire."""
        versions = self.versions()
        for session in self._sessions:
            session.announce(versions)

    async def close(self) -> None:
        """Stop listening, cancel what runs, and part from every client."""
        if self._listener is not None:
            self._listener.close()
        sessions = list(self._sessions)
        for session in sessions:
            session.end()
        if sessions:
            await asyncio.wait([session.gone for session in sessions], timeout=_CLOSE_GRACE_S)
        for session in self._sessions.copy():
            session.abort()
        if self._listener is not None:
            await self._listener.wait_closed()

    # --- called by sessions -------------------------------------------------------------------------------------------

    def _session(self) -> Session:
        return Session(self, self._engine, ServerHandshake(self._token, self.replica))

    def joined(self, session: Session) -> None:
        """A peer connected."""
        self._sessions.add(session)

    def left(self, session: Session) -> None:
        """A peer is gone."""
        self._sessions.discard(session)

    def count_refusal(self, error: DoorRefused) -> None:
        """A peer failed its handshake."""
        self.refused[error.reason] += 1
        _log.warning("door %s: refused a peer: %s", self.replica, error)
