"""A client that loses cancellations, as redis-py does with a few in a hundred: deadlines hold all the same."""

import asyncio

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from headrace.platform.errors import LedgerAway
from headrace.platform.ledger.redis_link import RedisLink

LONGEST_S = 10.0


class Forgetful:
    """Whatever is awaited takes for ever, and the cancellation that ends it becomes an answer, or an error."""

    def __init__(self, error: Exception | None) -> None:
        self.error, self.asked, self.waits = error, 0, asyncio.Event()

    async def ping(self) -> bool:
        self.asked += 1
        if self.asked == 1:
            raise RedisConnectionError("nobody listens")
        self.waits.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if self.error is not None:
                raise self.error from None
        return True


@pytest.mark.parametrize("error", [RedisConnectionError("reset by peer"), OSError("reset"), None])
async def test_connecting_ends_at_its_deadline(error: Exception | None) -> None:  # case X8
    link = RedisLink(Forgetful(error), "redis://127.0.0.1:1/0", "mine")
    async with asyncio.timeout(LONGEST_S):
        with pytest.raises(LedgerAway, match=r"no ledger at .* nobody listens"):
            await link._wait_ready(0.1)


@pytest.mark.parametrize("error", [RedisConnectionError("reset by peer"), None])
async def test_a_command_that_is_cancelled_is_cancelled(error: Exception | None) -> None:  # case X4
    client = Forgetful(error)
    client.asked = 1
    link = RedisLink(client, "redis://127.0.0.1:1/0", "mine")
    calling = asyncio.create_task(link.command("ping", client.ping()))
    await client.waits.wait()
    calling.cancel()
    await asyncio.wait({calling}, timeout=LONGEST_S)
    assert calling.cancelled()
