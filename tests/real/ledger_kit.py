"""Ledgers on a real server for the ledger suite: each of a run of its own, with the mishaps that a server may have."""

import itertools
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from redis.asyncio import Redis

from headrace.platform.ledger.redis_ledger import RedisLedger
from headrace.platform.records.delivery import LedgerLimits
from headrace.platform.testing.conformance.ledger_harness import LedgerFactory, LedgerHarness, limits

START_S = 1000.0
_runs = (f"run-{number}" for number in itertools.count())


def next_run() -> str:
    """A run id that no other test of this process has."""
    return next(_runs)


class Mishaps:
    """What may happen to the server of `run`, done to the run's keys; the client is told nothing."""

    def __init__(self, client: "Redis", ledger: RedisLedger, run: str) -> None:
        self._client = client
        self._ledger = ledger
        self._run = run
        self._now_s = START_S

    async def advance(self, seconds: float) -> None:
        """Let the ledger's time pass."""
        self._now_s += seconds
        await self._ledger.set_clock(self._now_s)

    async def mark(self) -> object:
        """Everything that the run has on the server."""
        return {key: await self._client.dump(key) for key in await self._keys()}

    async def rewind(self, token: object) -> None:
        """The server is back with what it had at a `mark`."""
        assert isinstance(token, dict)
        await self.wipe()
        for key, value in token.items():
            await self._client.restore(key, 0, value, replace=True)
        await self._ledger.set_clock(self._now_s)

    async def forget(self) -> None:
        """Take the run from the server."""
        keys = await self._keys()
        if keys:
            await self._client.delete(*keys)

    async def wipe(self) -> None:
        """The server is back without anything."""
        await self.forget()
        await self._client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        await self._ledger.set_clock(self._now_s)

    async def restart(self) -> None:
        """The server is back with everything, and another run id than the one that the ledger has seen."""
        await self._client.hset(f"{{{self._run}}}:meta", "server_run", "before")
        await self._client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    async def _keys(self) -> list[bytes]:
        return [key async for key in self._client.scan_iter(f"{{{self._run}}}:*", count=1000)]


@asynccontextmanager
async def connected(url: str, chosen: LedgerLimits, run: str = "") -> AsyncIterator[LedgerHarness]:
    """A fresh ledger at `url`, of `run` or of one that nothing else has; it leaves nothing there."""
    run = run or next_run()
    ledger = await RedisLedger.connect(url, run, chosen)
    client = Redis.from_url(url)
    mishaps = Mishaps(client, ledger, run)
    await mishaps.advance(0.0)
    try:
        yield LedgerHarness(
            ledger=ledger,
            run=run,
            advance=mishaps.advance,
            mark=mishaps.mark,
            rewind=mishaps.rewind,
            wipe=mishaps.wipe,
            restart=mishaps.restart,
        )
    finally:
        await ledger.close()
        await mishaps.forget()
        await client.aclose()


def ledgers(url: str) -> LedgerFactory:
    """What the suite takes."""

    def fresh(chosen: LedgerLimits) -> AbstractAsyncContextManager[LedgerHarness]:
        return connected(url, chosen)

    return fresh


def fresh(url: str) -> AbstractAsyncContextManager[LedgerHarness]:
    """A ledger with the suite's usual limits."""
    return connected(url, limits())
