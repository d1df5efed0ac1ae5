"""Versions and pins under random play, on the registries that need no server (P6, P8, P12; case Q17)."""

import itertools
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from hypothesis import HealthCheck, settings

from headrace.platform.contracts import Clock, Ledger, VersionRegistry
from headrace.platform.ledger.memory import MemoryLedger
from headrace.platform.registry.files import FileRegistry
from headrace.platform.registry.memory import MemoryRegistry
from headrace.platform.registry.pins import MemoryPins
from headrace.platform.testing.conformance.ledger_harness import limits
from headrace.platform.testing.conformance.registry import RegistryHarness
from headrace.platform.testing.conformance.registry_machine import RegistryMachine

SETTINGS = settings(max_examples=20, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck))
_roots = (f"memory://machine-{number}" for number in itertools.count())


class _Played(RegistryMachine):
    @staticmethod
    def build(ledger: Ledger, clock: Clock, folder: Path) -> VersionRegistry:
        raise NotImplementedError

    @classmethod
    @asynccontextmanager
    async def factory(cls) -> AsyncIterator[RegistryHarness]:
        now_s = 0.0

        async def advance(seconds: float) -> None:
            nonlocal now_s
            now_s += seconds

        ledger = MemoryLedger("r", limits(), lambda: now_s)
        with tempfile.TemporaryDirectory() as folder:
            registry = cls.build(ledger, lambda: now_s, Path(folder))
            yield RegistryHarness(registry=registry, ledger=ledger, advance=advance)
            await registry.close()


class InMemory(_Played):
    @staticmethod
    def build(ledger: Ledger, clock: Clock, folder: Path) -> MemoryRegistry:
        return MemoryRegistry(ledger, clock)


class OnDisk(_Played):
    @staticmethod
    def build(ledger: Ledger, clock: Clock, folder: Path) -> FileRegistry:
        root, cache = str(folder / "run"), folder / "cache"
        return FileRegistry(root, ledger, cache_dir=cache, run="r", pins=MemoryPins(clock))


class OnAnObjectStore(_Played):
    @staticmethod
    def build(ledger: Ledger, clock: Clock, folder: Path) -> FileRegistry:
        return FileRegistry(next(_roots), ledger, cache_dir=folder, run="r", pins=MemoryPins(clock))


TestInMemory = InMemory.TestCase
TestInMemory.settings = SETTINGS
TestOnDisk = OnDisk.TestCase
TestOnDisk.settings = SETTINGS
TestOnAnObjectStore = OnAnObjectStore.TestCase
TestOnAnObjectStore.settings = SETTINGS
