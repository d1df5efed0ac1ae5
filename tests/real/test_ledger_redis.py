"""The Redis ledger passes the suite that every ledger passes, on every server at hand, over unix socket and TCP."""

import asyncio
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ledger_kit import fresh, ledgers, next_run
from redis import Redis as SyncRedis
from redis.asyncio import Redis

from headrace.platform.contracts import Ledger
from headrace.platform.errors import ConfigError, DeadlineExceeded, LedgerError
from headrace.platform.ledger.fate_log import FATE_LOG_MOST
from headrace.platform.ledger.redis_ledger import RedisLedger
from headrace.platform.ledger.server import EmbeddedServer
from headrace.platform.testing.conformance.ledger import LEDGER_SUITE
from headrace.platform.testing.conformance.ledger_harness import LedgerHarness, limits, raises


@pytest.fixture(scope="module", params=["valkey", "redis", "valkey-tcp"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    binary = shutil.which("redis-server") if request.param == "redis" else None
    if request.param == "redis" and binary is None:
        pytest.skip("redis-server is not installed")
    directory = tmp_path_factory.mktemp(request.param)
    with EmbeddedServer(directory, tcp=request.param == "valkey-tcp", binary=binary and Path(binary)) as server:
        if binary is not None:
            with SyncRedis.from_url(server.url) as client:
                client.config_set("appendfsync", "always")  # P11: this server cannot be asked what is on disk
        yield server.url


# cases Q1 Q2 Q3 Q4 Q5 Q7 Q8 Q10 Q11 Q12 Q15 Q18 Q20 Q23 Q24 E7
@pytest.mark.parametrize("case", LEDGER_SUITE)
async def test_suite(case: str, url: str) -> None:
    await LEDGER_SUITE[case](ledgers(url))


async def test_time_is_the_servers(url: str) -> None:
    async with fresh(url) as h:
        await h.begin()
        await h.ledger.set_clock(None)
        before_s = time.time()
        ticket = (await h.admit(0, 1))[0]
        assert before_s - 1 < ticket.dispatched_s < time.time() + 1  # P12
        assert ticket.deadline_s == pytest.approx(ticket.dispatched_s + 60.0)


async def test_all_keys_share_a_hash_tag_and_finished_groups_leave_none(url: str) -> None:
    async with fresh(url) as h:
        fence = await h.begin()
        await h.ready(0, 2)
        await h.publish(fence, 0, await h.ledger.lease(fence, 0, 0, 2))
        client = Redis.from_url(url)
        assert await client.exists(f"{{{h.run}}}:g:0")
        assert not [key async for key in client.scan_iter(f"{{{h.run}}}:p:*")]  # P9
        await h.ledger.settle(fence, 1)
        _, position = await h.ledger.fates(0, 10)
        await h.ledger.fates(position, 10)
        keys = {key.decode().removeprefix(f"{{{h.run}}}:") async for key in client.scan_iter(f"*{h.run}*")}
        await client.aclose()
        assert keys == {"meta", "limits", "counts", "versions", "heads"}  # P4, P10


async def test_the_oldest_unread_fates_go_first(url: str) -> None:
    async with fresh(url) as h:
        await h.begin()
        client = Redis.from_url(url)
        keys = [f"{{{h.run}}}:{name}" for name in ("meta", "fatelog")]
        await client.hset(keys[0], "fatelog", FATE_LOG_MOST)
        for first in range(1, FATE_LOG_MOST + 1, 50_000):
            await client.rpush(keys[1], *(f"{i} 0 0 dropped:lag" for i in range(first, first + 50_000)))
        await h.admit(0, 1)
        await h.put(h.failed(0, 0, retryable=False), h.failed(0, 1, retryable=False))
        assert await client.llen(keys[1]) == FATE_LOG_MOST
        await client.aclose()
        rows, position = await h.ledger.fates(0, 1)
        assert (rows[0].episode_id, position) == (f"{h.run}.t3.0.0", 3), "1 and 2 are gone"
        rows, position = await h.ledger.fates(FATE_LOG_MOST, 10)
        assert [row.episode_id for row in rows] == [f"{h.run}.t0.0.0", f"{h.run}.t0.1.0"]
        assert await h.ledger.fates(position, 10) == ([], FATE_LOG_MOST + 2)


async def test_the_second_connection_brings_the_same_limits(url: str) -> None:
    async with fresh(url) as h:
        same = await RedisLedger.connect(url, h.run, limits())
        await h.begin()
        assert (await same.stats()).head == 0
        await same.close()
        with pytest.raises(ConfigError, match="max_lag is 1 there and 3 here"):
            await RedisLedger.connect(url, h.run, limits(max_lag=3))


async def test_a_server_that_may_evict_is_refused(url: str) -> None:
    client = Redis.from_url(url)
    await client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(LedgerError, match="CONFIG SET maxmemory-policy noeviction"):
            await RedisLedger.connect(url, next_run(), limits())
    finally:
        await client.config_set("maxmemory-policy", "noeviction")
        await client.aclose()


async def test_a_lost_script_cache_is_no_loss(url: str) -> None:
    async with fresh(url) as h:
        await h.begin()
        client = Redis.from_url(url)
        await client.script_flush()
        await client.aclose()
        assert (await h.stats()).head == 0


async def test_two_learners_in_two_connections(url: str) -> None:  # case Q18
    async with fresh(url) as h:
        await h.begin()
        others = [await RedisLedger.connect(url, h.run, limits()) for _ in range(4)]
        fences = await asyncio.gather(
            *(ledger.acquire_learner(str(i), takeover=True) for i, ledger in enumerate(others))
        )
        assert len(set(fences)) == 4
        results = await asyncio.gather(*(publish_next(*pair) for pair in zip(others, fences, strict=True)))
        assert [fence for fence, won in zip(fences, results, strict=True) if won] == [max(fences)]
        await asyncio.gather(*(ledger.close() for ledger in others))


async def publish_next(ledger: Ledger, fence: int) -> bool:
    h = LedgerHarness(ledger=ledger, run="unused", advance=asyncio.sleep)
    try:
        await h.publish(fence, 0)
    except LedgerError:
        return False
    return True


async def test_nobody_there() -> None:
    with pytest.raises(LedgerError, match=r"no ledger at redis://127\.0\.0\.1:1/0") as caught:
        await RedisLedger.connect("redis://:marked-secret@127.0.0.1:1/0", "r", limits(), connect_deadline_s=0.2)
    assert "marked-secret" not in str(caught.value)
    with pytest.raises(ConfigError, match="no server address"):
        await RedisLedger.connect("http://127.0.0.1", "r", limits())
    with pytest.raises(ConfigError, match="braces"):
        await RedisLedger.connect("redis://127.0.0.1:1/0", "r}", limits())


async def test_a_server_that_accepts_and_never_answers() -> None:  # case X8
    hung = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await hung.wait()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    await raises(
        DeadlineExceeded, RedisLedger.connect(f"redis://127.0.0.1:{port}/0", "r", limits(), connect_deadline_s=0.3)
    )
    hung.set()
    server.close()
    await server.wait_closed()
