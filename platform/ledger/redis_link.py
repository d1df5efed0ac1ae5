"""A connection to the server of a ledger: deadlines, errors by name, and the Lua files as callables.

Owns everything that knows redis-py. No call is ever repeated here: a transition whose reply was lost may have
happened, and only its caller knows whether it may be sent again.
"""

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from headrace.platform.errors import CommitRefused, ConfigError, DeadlineExceeded, Fenced, LedgerError

T = TypeVar("T")

CALL_DEADLINE_S = 5.0
"""How long any one call may take."""
_MAX_CONNECTIONS = 32
_RETRY_PAUSE_S = 0.05
_ERRORS: dict[bytes, type[LedgerError]] = {b"FENCED": Fenced, b"REFUSED": CommitRefused, b"ERROR": LedgerError}


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
    """One run's server. Make one with `connect`."""

    def __init__(self, client: "Redis", url: str, run: str) -> None:
        self.client = client
        self.prefix = key_prefix(run)
        self._url = shown(url)
        self._scripts: dict[str, Any] = {}

    @classmethod
    async def connect(cls, url: str, run: str, *, deadline_s: float = 10.0) -> "RedisLink":
        """Connect, waiting for a server that is still coming up, and check that it never evicts.

        Raises:
            ConfigError: `url` or `run` is malformed.
            LedgerError: nothing listens at `url`, it refuses the password, or it may evict keys.
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
            await link._check_policy()
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
            raise LedgerError(f"no ledger at {self._url} within {deadline_s:g} s: {refused}") from error

    async def _check_policy(self) -> None:
        memory = await self.command("info memory", self.client.info("memory"))
        policy = str(memory.get("maxmemory_policy", "noeviction"))
        if policy != "noeviction":
            raise LedgerError(
                f"{self._url} has maxmemory-policy {policy}, so it may throw the run's queue away."
                " Run `CONFIG SET maxmemory-policy noeviction` there, or use a server of its own."
            )

    async def command(self, what: str, call: Awaitable[T]) -> T:
        """Await a redis-py call. Raises LedgerError and DeadlineExceeded for its errors."""
        with self._translated(what), _cancellation_kept():
            return await call

    async def transition(self, name: str, *args: str | bytes | int | float) -> list[Any]:
        """Run `lua/NAME.lua` and return its reply after the OK.

        Raises:
            Fenced, CommitRefused, LedgerError: as the script says.
            DeadlineExceeded: no answer; the step may or may not have happened.
        """
        if name not in self._scripts:
            self._scripts[name] = self.client.register_script(_script_text(name))
        with self._translated(name), _cancellation_kept():
            reply: list[Any] = await self._scripts[name](keys=[f"{self.prefix}meta"], args=args)
        if reply[0] != b"OK":
            raise _ERRORS[reply[0]](reply[1].decode())
        return reply[1:]

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except RedisTimeoutError as error:
            raise DeadlineExceeded(f"{self._url} did not answer {what} within {CALL_DEADLINE_S:g} s") from error
        except RedisError as error:
            raise LedgerError(f"{what} at {self._url} failed: {error}") from error

    async def close(self) -> None:
        """Release every connection."""
        await self.client.aclose()


@contextmanager
def _cancellation_kept() -> Iterator[None]:
    """Raise the cancellation that redis-py loses when it arrives while a reply is read (a few in a hundred)."""
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    yield
    if task is not None and task.cancelling() > before:
        raise asyncio.CancelledError


def _script_text(name: str) -> str:
    folder = files("headrace.platform.ledger") / "lua"
    return "\n".join((folder / f"{part}.lua").read_text("utf-8") for part in ("prelude", name))
