"""Versions and pins under random play, with the pins and the ledger on a server (P6, P8, P12; case Q17)."""

import itertools
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from headrace.platform.ledger.redis_ledger import RedisLedger
from headrace.platform.ledger.server import EmbeddedServer
from headrace.platform.registry.files import FileRegistry
from headrace.platform.registry.redis_pins import RedisPins
from headrace.platform.testing.conformance.ledger_harness import limits
from headrace.platform.testing.conformance.registry import RegistryHarness
from headrace.platform.testing.conformance.registry_machine import RegistryMachine

SETTINGS = settings(max_examples=15, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck))
_runs = (f"machine-{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EmbeddedServer(tmp_path_factory.mktemp("queue")) as server:
        yield server.url


def test_the_server_keeps_versions_and_pins(url: str) -> None:
    @asynccontextmanager
    async def fresh() -> AsyncIterator[RegistryHarness]:
        run, now_s = next(_runs), 1000.0
        ledger = await RedisLedger.connect(url, run, limits())
        await ledger.set_clock(now_s)

        async def advance(seconds: float) -> None:
            nonlocal now_s
            now_s += seconds
            await ledger.set_clock(now_s)

        pins = await RedisPins.connect(url, run)
        with tempfile.TemporaryDirectory() as folder:
            root, cache = str(Path(folder, "run")), Path(folder, "cache")
            registry = FileRegistry(root, ledger, cache_dir=cache, run=run, pins=pins)
            yield RegistryHarness(registry=registry, ledger=ledger, advance=advance)
            await registry.close()
        await ledger.close()

    class OnAServer(RegistryMachine):
        factory = staticmethod(fresh)

    run_state_machine_as_test(OnAServer, settings=SETTINGS)
