"""The connection under the ledger: many calls on one wire, a server that cannot answer now, what is durable."""

import asyncio
import logging
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ledger_kit import connected, fresh, next_run
from redis import Redis as SyncRedis
from redis.asyncio import Redis

from headrace.platform.errors import LedgerAway, LedgerRewound
from headrace.platform.ledger.redis_ledger import RedisLedger
from headrace.platform.ledger.server import EmbeddedServer
from headrace.platform.records.delivery import Outcome, Submission, Verdict
from headrace.platform.testing.conformance.ledger_chain import straight_chain
from headrace.platform.testing.conformance.ledger_harness import LedgerHarness, limits, raises


@pytest.fixture(params=["valkey", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    binary = shutil.which("redis-server") if request.param == "redis" else None
    if request.param == "redis" and binary is None:
        pytest.skip("redis-server is not installed")
    with EmbeddedServer(tmp_path / "queue", binary=binary and Path(binary)) as server:
        yield server.url


@pytest.fixture
def admin(url: str) -> Iterator["SyncRedis"]:
    with SyncRedis.from_url(url) as client:
        yield client


def large(h: LedgerHarness, group: int, sample: int, content: bytes, score: float = 0.0) -> Submission:
    return Submission(
        attempt_id=h.attempt(group, sample),
        outcome=Outcome.DONE,
        payload=content,
        payload_hash=f"hash of {len(content)} times {content[:1]!r}",
        store_file="file",
        score=score,
    )


async def test_many_calls_share_the_wire(url: str) -> None:
    async with fresh(url) as h:
        fence = await h.begin()
        numbers = await asyncio.gather(*(h.ledger.stage(fence) for _ in range(100)))
        assert numbers == list(range(1, 101)), "requests are answered in their order"


async def test_a_cancelled_call_leaves_its_place(url: str) -> None:  # case X4
    async with fresh(url) as h:
        fence = await h.begin()
        calls = [asyncio.create_task(h.ledger.stage(fence)) for _ in range(20)]
        await asyncio.sleep(0)  # they are sent
        for call in calls[::2]:
            call.cancel()
        left = await asyncio.gather(*calls, return_exceptions=True)
        assert left[1::2] == list(range(2, 21, 2))
        assert {type(reply) for reply in left[::2]} == {asyncio.CancelledError}
        assert await h.ledger.stage(fence) == 21


async def test_payloads_of_every_size_come_back(url: str) -> None:
    async with connected(url, limits(batch_groups=8, min_group=1, drop_zero_variance=False)) as h:
        fence = await h.begin()
        sizes = (1, 4096, 4097, 300_000, 3_000_000)
        await h.admit(0, len(sizes), size=2)
        payloads = [[bytes([65 + sample]) * size for sample in range(2)] for size in sizes]
        await h.put(*(large(h, g, s, payload) for g, pair in enumerate(payloads) for s, payload in enumerate(pair)))
        leased = await h.ledger.lease(fence, 0, 0, len(sizes))
        assert [[member.payload for member in group.members] for group in leased] == payloads
        assert (await h.stats()).payload_bytes == 2 * sum(sizes)


async def test_a_refused_put_leaves_no_payload(url: str, admin: "SyncRedis") -> None:
    """And takes none: the payload that was accepted before stays what it was."""
    async with fresh(url) as h:
        fence = await h.begin()
        await h.admit(0, 2)
        first, other = large(h, 0, 0, b"first", 1.0), large(h, 0, 0, b"others")
        accepted = await h.put(first, other, first, large(h, 9, 0, b"nowhere"), large(h, 1, 7, b"no slot"))
        assert accepted == [Verdict.ACCEPTED, Verdict.CONFLICT, Verdict.DUPLICATE, Verdict.CONFLICT, Verdict.CONFLICT]
        assert payload_keys(admin, h.run) == 1
        await h.put(large(h, 0, 1, b"second", 0.0))
        (group,) = await h.ledger.lease(fence, 0, 0, 1)
        assert [member.payload for member in group.members] == [b"first", b"second"]
        await h.put(large(h, 1, 0, b"equal"), large(h, 1, 1, b"equal"))
        assert payload_keys(admin, h.run) == 2, "a group without variance takes its payloads with it"
        await h.publish(fence, 0, [group])
        assert await h.put(first) == [Verdict.DUPLICATE]
        assert payload_keys(admin, h.run) == 0
        admin.hset(f"{{{h.run}}}:meta", "suspect", 1)
        await raises(LedgerRewound, h.put(large(h, 1, 0, b"late")))
        assert payload_keys(admin, h.run) == 0


def payload_keys(admin: "SyncRedis", run: str) -> int:
    return len(list(admin.scan_iter(f"{{{run}}}:p:*")))


async def test_keys_that_are_gone_without_a_restart(url: str, admin: "SyncRedis") -> None:  # P8
    async with fresh(url) as h:
        await h.begin()
        admin.flushall()
        await raises(LedgerRewound, h.ledger.stage(1))
        assert not await h.ledger.confirm(0, "content-0")
        await h.ledger.reconcile(straight_chain([1]))
        assert (await h.stats()).head == 0
        assert len((await h.ledger.admit(0, 2, 1, "worker")).tickets) == 1


async def test_a_server_that_cannot_answer_now_is_away(url: str, admin: "SyncRedis") -> None:
    async with fresh(url) as h:
        await h.begin()
        admin.execute_command("REPLICAOF", "127.0.0.1", "1")
        await raises(LedgerAway, h.stats())
        admin.execute_command("REPLICAOF", "NO", "ONE")
        assert (await h.stats()).head == 0
        admin.config_set("busy-reply-threshold", "1")
        busy = Redis.from_url(url)
        endless = asyncio.create_task(busy.eval("while true do end", 0))
        try:
            end_s = time.monotonic() + 10
            while not await is_away(h):
                assert time.monotonic() < end_s, "the server is never busy"
        finally:
            admin.execute_command("SCRIPT", "KILL")
        with pytest.raises(Exception, match="killed"):
            await endless
        await busy.aclose()
        assert (await h.stats()).head == 0


async def is_away(h: LedgerHarness) -> bool:
    try:
        await h.stats()
    except LedgerAway:
        return True
    return False


async def test_missing_persistence_is_warned_about(
    url: str, admin: "SyncRedis", caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        ledger = await RedisLedger.connect(url, next_run(), limits())
        assert (ledger.warnings, caplog.text) == ((), "")
        assert await ledger.durable(5.0) or "valkey_version" not in admin.info("server")
        await ledger.close()
        admin.config_set("appendonly", "no")
        ledger = await RedisLedger.connect(url, next_run(), limits())
    (warning,) = ledger.warnings
    assert "CONFIG SET appendonly yes" in warning
    assert warning in caplog.text
    assert not await ledger.durable(0.5)  # P11
    await ledger.close()


async def test_durable_means_on_the_disk(url: str, admin: "SyncRedis") -> None:  # P11
    waits = "valkey_version" in admin.info("server")
    async with fresh(url) as h:
        await h.begin()
        admin.config_set("appendfsync", "no")
        assert not await h.ledger.durable(0.05)
        admin.config_set("appendfsync", "everysec")
        assert await h.ledger.durable(10.0) is waits, "a server without WAITAOF cannot know"
        admin.config_set("appendfsync", "always")
        assert await h.ledger.durable(1.0)
        admin.hset(f"{{{h.run}}}:meta", "suspect", 1)
        await raises(LedgerRewound, h.ledger.durable(1.0))
