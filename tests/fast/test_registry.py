"""Both registries pass the suite that every registry passes; the file registry also meets torn and altered files."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import fsspec
import pytest

from headrace.platform.errors import NotFound, RegistryError
from headrace.platform.ledger.memory import MemoryLedger
from headrace.platform.registry.files import FileRegistry
from headrace.platform.registry.memory import MemoryRegistry
from headrace.platform.registry.pins import MemoryPins
from headrace.platform.testing.conformance.ledger_harness import limits
from headrace.platform.testing.conformance.registry import FILES, REGISTRY_SUITE, RegistryFactory, RegistryHarness

_roots = (f"memory://run-{number}" for number in itertools.count())


class ManualClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    async def advance(self, seconds: float) -> None:
        self.now_s += seconds


def leftovers(folder: Path) -> list[Path]:
    return list(folder.rglob(".partial-*"))


def inode_of(path: Path) -> int:
    return path.stat().st_ino


def is_there(path: Path) -> bool:
    return path.exists()


@asynccontextmanager
async def memory_registry() -> AsyncIterator[RegistryHarness]:
    clock = ManualClock()
    ledger = MemoryLedger("r", limits(), clock)
    registry = MemoryRegistry(ledger, clock)
    yield RegistryHarness(registry=registry, ledger=ledger, advance=clock.advance)
    await registry.close()


def file_registry(root_url: str, cache: Path) -> RegistryFactory:
    @asynccontextmanager
    async def fresh() -> AsyncIterator[RegistryHarness]:
        clock = ManualClock()
        ledger = MemoryLedger("r", limits(), clock)
        registry = FileRegistry(root_url, ledger, cache_dir=cache, run="r", pins=MemoryPins(clock))
        yield RegistryHarness(registry=registry, ledger=ledger, advance=clock.advance)
        await registry.close()

    return fresh


# case Q17
@pytest.mark.parametrize("kind", ["memory", "local", "remote"])
@pytest.mark.parametrize("case", REGISTRY_SUITE)
async def test_suite(case: str, kind: str, tmp_path: Path) -> None:
    local, remote = file_registry(str(tmp_path / "run"), tmp_path), file_registry(next(_roots), tmp_path / "cache")
    await REGISTRY_SUITE[case]({"memory": memory_registry, "local": local, "remote": remote}[kind])


@pytest.mark.parametrize("damage", ["altered", "torn", "missing"])
@pytest.mark.parametrize("scheme", ["local", "remote"])
async def test_damaged_files_are_named(damage: str, scheme: str, tmp_path: Path) -> None:  # P8
    root = str(tmp_path / "run") if scheme == "local" else next(_roots)
    async with file_registry(root, tmp_path / "cache")() as h:
        manifest = await h.write(0)
        store, base = fsspec.core.url_to_fs(root)
        path, data = f"{base}/{manifest.path}/model.safetensors", FILES["model.safetensors"]
        if damage == "missing":
            store.rm_file(path)
        else:
            store.pipe_file(path, data[:-1] if damage == "torn" else b"x" + data[1:])
        with pytest.raises(RegistryError, match=r"v000000/model\.safetensors is (missing|torn or altered)"):
            await h.registry.open(0)
        assert not leftovers(tmp_path)


async def test_torn_manifests_are_named_and_never_the_latest(tmp_path: Path) -> None:  # P8
    async with file_registry(str(tmp_path), tmp_path / "cache")() as h:
        first = await h.write(0)
        second = await h.write(1)
        file = tmp_path / "versions" / "000001.json"
        file.write_bytes(file.read_bytes()[:-20])
        with pytest.raises(RegistryError, match=r"000001\.json is torn"):
            await h.registry.open(1)
        with pytest.raises(RegistryError, match=r"000001\.json is torn"):
            await h.registry.manifest(second)
        assert await h.registry.latest() == first


async def test_the_cache_is_checked_and_kept(tmp_path: Path) -> None:
    root = next(_roots)
    async with file_registry(root, tmp_path)() as h:
        manifest = await h.write(0)
        folder = Path((await h.registry.open(0))[1])
        assert folder == tmp_path / "r" / manifest.path
        inode = inode_of(folder)
        folders = await asyncio.gather(*(h.registry.open(0) for _ in range(4)))
        assert {path for _, path in folders} == {str(folder)}
        assert inode_of(folder) == inode, "a good copy is not copied again"
        (folder / "config.json").write_bytes(b"altered")
        await h.registry.open(0)
        assert (folder / "config.json").read_bytes() == FILES["config.json"]


async def test_many_openers_copy_once(tmp_path: Path) -> None:
    async with file_registry(next(_roots), tmp_path)() as h:
        await h.write(0)
        assert len({path for _, path in await asyncio.gather(*(h.registry.open(0) for _ in range(8)))}) == 1
        assert len(list((tmp_path / "r" / "versions").iterdir())) == 1


async def test_a_manifest_cannot_lead_elsewhere(tmp_path: Path) -> None:
    async with file_registry(str(tmp_path), tmp_path / "cache")() as h:
        await h.write(0)
        file = tmp_path / "versions" / "000000.json"
        good = file.read_text()
        file.write_text(good.replace("versions/f0001-v000000", "../elsewhere"))
        with pytest.raises(RegistryError, match="instead of versions/f0001-v000000"):
            await h.registry.open(0)
        file.write_text(good.replace('"config.json"', '"../config.json"'))
        with pytest.raises(RegistryError, match="no plain file name"):
            await h.registry.open(0)


async def test_an_interrupted_removal_is_finished_later(tmp_path: Path) -> None:
    pins = MemoryPins(ManualClock())
    ledger = MemoryLedger("r", limits(), ManualClock())
    registry = FileRegistry(str(tmp_path), ledger, cache_dir=tmp_path / "cache", run="r", pins=pins)
    h = RegistryHarness(registry=registry, ledger=ledger, advance=ManualClock().advance)
    await h.write(0)
    await h.write(1)
    assert await pins.retire(0)
    with pytest.raises(NotFound):
        await registry.pin(0, "late", 60.0)
    assert await registry.retain([], newest=1) == [0]


async def test_a_memory_registry_leaves_no_folder() -> None:
    async with memory_registry() as h:
        await h.write(0)
        folder = Path((await h.registry.open(0))[1])
        assert is_there(folder)
    assert not is_there(folder)
