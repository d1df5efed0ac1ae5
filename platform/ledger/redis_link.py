"""A connection to the server of a ledger: deadlines, errors by name, and the Lua files as callables.

Owns everything that knows redis-py, and what this client has seen of the ledger (P8): the highest revision goes with
every transition, and every connection begins with the handshake of `open.lua`: a server that has restarted is noticed.

No call is ever repeated here: a transition whose reply was lost may have happened, and only its caller knows whether
it may be sent again.
"""

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from headrace.platform.errors import (
    CommitRefused,
    ConfigError,
    DeadlineExceeded,
    Fenced,
    LedgerAway,
    LedgerError,
    LedgerRewound,
)
from headrace.platform.ledger.redis_wire import Wire

T = TypeVar("T")
Argument = str | bytes | int | float

CALL_DEADLINE_S = 5.0
"""How long any one call may take."""
_MAX_CONNECTIONS = 32
_RETRY_PAUSE_S = 0.05
_WAIT_SLICE_S = 2.0
"""Longest wait for the disk in one call: well below the deadline of a call."""
_ERRORS: dict[bytes, type[LedgerError]] = {
    b"FENCED": Fenced,
    b"REFUSED": CommitRefused,
    b"ERROR": LedgerError,
    b"REWOUND": LedgerRewound,
}
_AWAY = ("LOADING", "BUSY", "READONLY", "MASTERDOWN", "MISCONF")
"""Refusals of a server that may answer later; the last is that of a full disk (P23)."""
_logger = logging.getLogger(__name__)


def shown(url: str) -> str:
    """`url` without user, password and options, for messages."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def key_prefix(run: str) -> str:
    """What all keys of a run begin with: one hash tag (P4). Raises ConfigError for a run id that would break it."""
    if not run or "{" in run or "}" in run:
        raise ConfigError(f"run id {run!r} must not be empty or contain braces")
    return f"{{{run}}}:"


class RedisLink:
    """One run's server. Make one with `connect`; `open` comes before the first transition.

    `seen` is the highest revision that any reply has named, and `warnings` what the user should know of the server.
    """

    def __init__(self, client: "Redis", url: str, run: str) -> None:
        self.client = client
        self.prefix = key_prefix(run)
        self.seen = 0
        self.warnings: tuple[str, ...] = ()
        self._url = shown(url)
        self._opening: Sequence[Argument] = ()
        self._server_run = b""
        self._lock = asyncio.Lock()
        self._wire: Wire | None = None

    @classmethod
    async def connect(cls, url: str, run: str, *, deadline_s: float = 10.0) -> "RedisLink":
        """Connect, waiting for a server that is still coming up, and check that it never evicts.

        Raises:
            ConfigError: `url` or `run` is malformed.
            LedgerAway: nothing listens at `url`.
            LedgerError: it refuses the password, or may evict keys.
            DeadlineExceeded: something listens but does not answer.
        """
        try:
            pool: Any = BlockingConnectionPool.from_url(
                url,
                max_connections=_MAX_CONNECTIONS,
                timeout=CALL_DEADLINE_S,
                socket_timeout=CALL_DEADLINE_S,
                socket_connect_timeout=CALL_DEADLINE_S,
                retry=Retry(NoBackoff(), 0),
                protocol=2,
            )
        except ValueError as error:
            raise ConfigError(f"{shown(url)} is no server address; use redis://, rediss:// or unix://") from error
        link = cls(Redis.from_pool(pool), url, run)
        try:
            await link._wait_ready(deadline_s)
            await link._check_server()
        except BaseException:
            await link.close()
            raise
        return link

    async def _wait_ready(self, deadline_s: float) -> None:
        refused: RedisConnectionError | None = None
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    try:
                        with _cancellation_kept():
                            await cast(Awaitable[Any], self.client.ping())
                        return
                    except AuthenticationError as error:
                        raise LedgerError(f"{self._url} refused the password") from error
                    except RedisConnectionError as error:
                        refused = error
                    await asyncio.sleep(_RETRY_PAUSE_S)
        except (TimeoutError, RedisTimeoutError) as error:
            if refused is None:
                raise DeadlineExceeded(f"{self._url} did not answer within {deadline_s:g} s") from error
            raise LedgerAway(f"no ledger at {self._url} within {deadline_s:g} s: {refused}") from error

    async def _check_server(self) -> None:
        found = await self.command("info", self.client.info("memory", "persistence"))
        policy = str(found.get("maxmemory_policy", "noeviction"))
        if policy != "noeviction":
            raise LedgerError(
                f"{self._url} has maxmemory-policy {policy}, so it may throw the run's queue away."
                " Run `CONFIG SET maxmemory-policy noeviction` there, or use a server of its own."
            )
        if not int(found.get("aof_enabled", 0)):
            warning = (
                f"{self._url} keeps no append-only file: what it holds is lost with it, and a run goes back to its"
                " last checkpoint. Run `CONFIG SET appendonly yes` there."
            )
            self.warnings = (warning,)
            _logger.warning(warning)

    # --- the handshake ------------------------------------------------------------------------------------------------

    async def open(self, limits: Sequence[Argument] = ()) -> list[Any]:
        """Do the handshake of `lua/open.lua`, now and whenever a connection is made; the limits that differ."""
        self._opening = limits
        with self._translated("open"):
            async with self._lock:
                return await self._open_wire()

    async def look_again(self) -> None:
        """Do the handshake once more: keys may be gone without a restart. Raises as `transition`."""
        await self.transition("open", self._server_run, *self._opening)

    async def _open_wire(self) -> list[Any]:
        if self._wire is not None:
            await self._wire.close()
        self._wire = await Wire.open(self.client.connection_pool)
        try:
            reply = self._read(await self._evaluate(self._wire, "open", (self._server_run, *self._opening)))
        except BaseException:
            # Nothing may be sent over a connection without its handshake.
            await self._wire.close()
            raise
        self._server_run, *differing = reply
        return differing

    async def _connected(self) -> Wire:
        async with self._lock:
            if self._wire is None or self._wire.is_closed:
                await self._open_wire()
            assert self._wire is not None
            return self._wire

    # --- calls --------------------------------------------------------------------------------------------------------

    async def command(self, what: str, call: Awaitable[T]) -> T:
        """Await a redis-py call. Raises LedgerError, LedgerAway and DeadlineExceeded for its errors."""
        with self._translated(what), _cancellation_kept():
            return await call

    async def transition(self, name: str, *args: Argument) -> list[Any]:
        """Run `lua/NAME.lua` and return its reply after the revision.

        Raises:
            Fenced, CommitRefused, LedgerRewound, LedgerError: as the script says.
            LedgerAway: no server, or none that can do this now.
            DeadlineExceeded: no answer; the step may or may not have happened, as after LedgerAway.
        """
        return await self._transition(name, args, ())

    async def transition_with(self, values: Mapping[str, bytes], name: str, *args: Argument) -> list[Any]:
        """Store `values` under their keys and run `lua/NAME.lua`, as one step: so they do not pass through the script,
        which would cost more than all that it does. It deletes what it does not want. Raises as `transition`."""
        flat: list[Argument] = []
        for key, value in values.items():
            flat += (self.prefix + key, value)
        return await self._transition(name, args, flat)

    async def _transition(self, name: str, args: Sequence[Argument], values: Sequence[Argument]) -> list[Any]:
        with self._translated(name):
            wire = self._wire
            if wire is None or wire.is_closed or self._lock.locked():
                wire = await self._connected()
            reply = await self._evaluate(wire, name, args, values)
        return self._read(reply)

    async def _evaluate(
        self, wire: Wire, name: str, args: Sequence[Argument], values: Sequence[Argument] = ()
    ) -> list[Any]:
        text, sha = _script(name)
        while True:
            if name not in wire.loaded:
                loaded = await wire.call(CALL_DEADLINE_S, ("SCRIPT", "LOAD", text))
                if isinstance(loaded, ResponseError):
                    raise loaded
                wire.loaded.add(name)
            evaluate = ("EVALSHA", sha, *self._arguments(args))
            if values:
                reply = await wire.call(CALL_DEADLINE_S, ("MULTI",), ("MSET", *values), evaluate, ("EXEC",))
                reply = reply if isinstance(reply, ResponseError) else reply[-1]
            else:
                reply = await wire.call(CALL_DEADLINE_S, evaluate)
            if not isinstance(reply, ResponseError):
                return list(reply)
            if not str(reply).startswith("NOSCRIPT"):
                raise reply
            # Somebody has flushed the scripts; it was not run.
            wire.loaded.clear()

    async def read(self, what: str, *command: Argument) -> Any:
        """A command that only reads, over the same connection as the transitions. Raises as `transition`."""
        with self._translated(what):
            reply = await (await self._connected()).call(CALL_DEADLINE_S, command)
            if isinstance(reply, ResponseError):
                raise reply
            return reply

    def _arguments(self, args: Sequence[Argument]) -> list[Any]:
        return [1, f"{self.prefix}meta", self.seen, *args]

    def _read(self, reply: list[Any]) -> list[Any]:
        kind, revision, *rest = reply
        self.seen = max(self.seen, revision)
        if kind != b"OK":
            raise _ERRORS[kind](rest[0].decode())
        return rest

    async def durable(self, timeout_s: float) -> bool:
        """Wait until everything that the server has answered is in its append-only file on disk (P11).

        The server waits for the last write of one connection, so a write goes before the wait. False when the time is
        over, or for a server that can neither wait nor writes through.

        Raises: as `transition`.
        """
        end_s = asyncio.get_running_loop().time() + timeout_s
        await self.transition("touch")
        while True:
            left_s = end_s - asyncio.get_running_loop().time()
            reply = await self._wait_for_disk(max(min(left_s, _WAIT_SLICE_S), 0.001))
            if isinstance(reply, Exception):
                return await self._writes_through()
            if int(reply[0]) >= 1 or left_s <= _WAIT_SLICE_S:
                return int(reply[0]) >= 1

    async def _wait_for_disk(self, timeout_s: float) -> Any:
        """The reply to WAITAOF after a transition on the same connection, or the server's refusal of it."""
        with self._translated("durable"), _cancellation_kept():
            pipe = self.client.pipeline(transaction=False)
            pipe.evalsha(_script("touch")[1], *self._arguments(()))
            pipe.execute_command("WAITAOF", 1, 0, int(timeout_s * 1000))
            touched, waited = await pipe.execute(raise_on_error=False)
            if isinstance(touched, Exception):
                raise touched
        self._read(touched)
        return waited

    async def _writes_through(self) -> bool:
        """Whether every reply comes after the disk has it; servers without WAITAOF know nothing better."""
        try:
            found = await self.command("config", self.client.config_get("append*"))
        except LedgerAway:
            raise
        except LedgerError:
            return False
        return (found.get("appendonly"), found.get("appendfsync")) == ("yes", "always")

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except RedisTimeoutError as error:
            raise DeadlineExceeded(f"{self._url} did not answer {what} within {CALL_DEADLINE_S:g} s") from error
        except AuthenticationError as error:
            raise LedgerError(f"{self._url} refused the password") from error
        except RedisConnectionError as error:
            raise LedgerAway(f"{self._url} is away, at {what}: {error}") from error
        except RedisError as error:
            kind = LedgerAway if str(error).startswith(_AWAY) else LedgerError
            raise kind(f"{what} at {self._url} failed: {error}") from error

    async def close(self) -> None:
        """Release every connection."""
        if self._wire is not None:
            await self._wire.close()
        await self.client.aclose()
        await asyncio.sleep(0)  # what redis-py closes without waiting is gone after one turn of the loop


@contextmanager
def _cancellation_kept() -> Iterator[None]:
    """Raise the cancellation that redis-py loses when it arrives while a reply is read (a few in a hundred), whether
    the call returns then or fails. A deadline cancels once: whoever tries again would try for ever."""
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    try:
        yield
    finally:
        if task is not None and task.cancelling() > before:
            raise asyncio.CancelledError


_SHARED = ("prelude", "lineage", "groups", "transition")
_LEARNING = {
    "acquire",
    "at_risk",
    "commit",
    "confirm",
    "drop",
    "extend",
    "lease",
    "reconcile",
    "rollback",
    "settle",
    "stop",
}
"""Scripts that have lua/learning.lua as well; for the others it would cost more than their own work."""


@cache
def _script(name: str) -> tuple[str, str]:
    """The text of a script with what all share in front of it, and the name that the server knows it by."""
    folder = files("headrace.platform.ledger") / "lua"
    parts = (*_SHARED, "learning", name) if name in _LEARNING else (*_SHARED, name)
    text = "\n".join((folder / f"{part}.lua").read_text("utf-8") for part in parts)
    return text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
