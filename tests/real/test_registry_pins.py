"""The file registry with pins on a server: what all processes of a run share."""

import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace.platform.ledger.redis_ledger import RedisLedger
from headrace.platform.ledger.server import EmbeddedServer
from headrace.platform.registry.files import FileRegistry
from headrace.platform.registry.redis_pins import RedisPins
from headrace.platform.testing.conformance.ledger_harness import limits
from headrace.platform.testing.conformance.registry import REGISTRY_SUITE, RegistryHarness

_runs = (f"pins-{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EmbeddedServer(tmp_path_factory.mktemp("queue")) as server:
        yield server.url


# case Q17
@pytest.mark.parametrize("case", REGISTRY_SUITE)
async def test_suite(case: str, url: str, tmp_path: Path) -> None:
    @asynccontextmanager
    async def fresh() -> AsyncIterator[RegistryHarness]:
        run = next(_runs)
        ledger = await RedisLedger.connect(url, run, limits())
        await ledger.set_clock(1000.0)
        now_s = 1000.0

        async def advance(seconds: float) -> None:
            nonlocal now_s
            now_s += seconds
            await ledger.set_clock(now_s)

        pins = await RedisPins.connect(url, run)
        registry = FileRegistry(str(tmp_path), ledger, cache_dir=tmp_path / "cache", run=run, pins=pins)
        yield RegistryHarness(registry=registry, ledger=ledger, advance=advance)
        await registry.close()
        await ledger.close()

    await REGISTRY_SUITE[case](fresh)


async def test_a_pin_in_one_process_holds_in_another(url: str) -> None:  # case Q17
    run = next(_runs)
    replica, learner = await RedisPins.connect(url, run), await RedisPins.connect(url, run)
    assert await replica.pin(3, "replica", 60.0)
    assert not await learner.retire(3)
    await replica.unpin(3, "replica")
    assert await learner.retire(3)
    assert not await replica.pin(3, "replica", 60.0)
    await replica.close()
    await learner.close()
