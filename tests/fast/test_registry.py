"""Both registries pass the suite that every registry passes; the file registry also meets torn and altered files."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import fsspec
import msgspec
import pytest

from headrace.platform.errors import LedgerAway, NotFound, RegistryError, SchemaError
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


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


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


def damage_files(kind: str, store: Any, folder: str) -> None:
    weights, config = f"{folder}/model.safetensors", f"{folder}/config.json"
    data = FILES["model.safetensors"]
    if kind == "missing":
        store.rm_file(weights)
    elif kind == "swapped":
        store.pipe_file(weights, FILES["config.json"])
        store.pipe_file(config, data)
    else:
        flipped = bytes([data[0] ^ 1]) + data[1:]
        store.pipe_file(weights, {"cut": data[:-1], "longer": data + b"x", "empty": b"", "bit": flipped}[kind])


@pytest.mark.parametrize("kind", ["bit", "cut", "longer", "empty", "missing", "swapped"])
@pytest.mark.parametrize("scheme", ["local", "remote"])
async def test_damaged_files_are_named(kind: str, scheme: str, tmp_path: Path) -> None:  # P8
    root = str(tmp_path / "run") if scheme == "local" else next(_roots)
    async with file_registry(root, tmp_path / "cache")() as h:
        manifest = await h.write(0)
        await h.write(1)
        store, base = fsspec.core.url_to_fs(root)
        damage_files(kind, store, f"{base}/{manifest.path}")
        with pytest.raises(
            RegistryError, match=r"v000000/(model\.safetensors|config\.json) is (missing|torn or altered)"
        ):
            await h.registry.open(0)
        await h.registry.open(1)
        assert not leftovers(tmp_path)


@pytest.mark.parametrize("kind", ["bit", "cut", "longer", "empty", "missing", "swapped"])
async def test_a_damaged_copy_on_the_node_is_made_again(kind: str, tmp_path: Path) -> None:  # P8
    async with file_registry(next(_roots), tmp_path)() as h:
        await h.write(0)
        folder = (await h.registry.open(0))[1]
        damage_files(kind, *fsspec.core.url_to_fs(folder))
        assert (await h.registry.open(0))[1] == folder
        assert contents(Path(folder)) == FILES


async def test_torn_manifests_are_named_and_never_the_latest(tmp_path: Path) -> None:  # P8
    async with file_registry(str(tmp_path), tmp_path / "cache")() as h:
        first = await h.write(0)
        second = await h.write(1)
        third = await h.write(2)
        file = tmp_path / "versions" / "000001.json"
        whole = file.read_bytes()
        file.write_bytes(whole[:-20])
        with pytest.raises(RegistryError, match=r"000001\.json is torn"):
            await h.registry.open(1)
        with pytest.raises(RegistryError, match=r"000001\.json is torn"):
            await h.registry.manifest(second)
        assert list(await h.registry.manifests()) == [first, third]
        (tmp_path / "versions" / "000002.json").write_bytes(b"")
        assert await h.registry.latest() == first
        assert list(await h.registry.manifests(after=0)) == []
        assert await h.registry.highest_number() == 2, "a torn manifest has used its number (P6)"
        assert await h.registry.retain([], newest=0) == [0], "what has no manifest is not a version"


async def test_manifests_of_another_schema(tmp_path: Path) -> None:
    """The one before is read, with nothing to deliver again; a newer one is refused by name."""
    async with file_registry(str(tmp_path), tmp_path / "cache")() as h:
        await h.write(0)
        file = tmp_path / "versions" / "000000.json"
        plain = msgspec.json.decode(file.read_bytes())
        file.write_bytes(msgspec.json.encode({**plain, "schema_version": 1}))
        found = await h.registry.latest()
        assert found is not None
        assert (found.schema_version, found.groups) == (1, ())
        file.write_bytes(msgspec.json.encode({**plain, "schema_version": 3}))
        with pytest.raises(SchemaError, match=r"schema 3; this build reads \(1, 2\)"):
            await h.registry.latest()


async def test_a_table_that_forgot_what_was_removed_pins_nothing(tmp_path: Path) -> None:  # case Q17
    """The server of the pins came back empty: the files are looked for."""
    now, cache = ManualClock(), tmp_path / "cache"
    ledger = MemoryLedger("r", limits(), now)
    before, after = (
        FileRegistry(str(tmp_path), ledger, cache_dir=cache, run="r", pins=MemoryPins(now)) for _ in range(2)
    )
    h = RegistryHarness(registry=before, ledger=ledger, advance=now.advance)
    await h.write(0)
    await h.write(1)
    assert await before.retain([], newest=1) == [0]
    with pytest.raises(NotFound, match="files of version 0 were removed"):
        await after.pin(0, "replica", 60.0)
    await after.pin(1, "replica", 60.0)
    assert await after.retain([], newest=0) == []


async def test_removal_waits_for_a_server_that_is_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class AwayPins(MemoryPins):
        away = True

        async def retire(self, version: int) -> bool:
            if self.away and version == 1:
                raise LedgerAway("connection refused")
            return await super().retire(version)

    pins = AwayPins(ManualClock())
    ledger = MemoryLedger("r", limits(), ManualClock())
    registry = FileRegistry(str(tmp_path), ledger, cache_dir=tmp_path / "cache", run="r", pins=pins)
    h = RegistryHarness(registry=registry, ledger=ledger, advance=ManualClock().advance)
    for number in range(3):
        await h.write(number)
    assert await registry.retain([], newest=1) == [0]
    assert "connection refused" in caplog.text
    pins.away = False
    assert await registry.retain([], newest=1) == [1]


async def test_orphans_stay_while_the_ledger_is_not_trusted(tmp_path: Path) -> None:  # P6, P8
    clock = ManualClock()
    ledger = MemoryLedger("r", limits(), clock)
    registry = FileRegistry(str(tmp_path), ledger, cache_dir=tmp_path / "cache", run="r", pins=MemoryPins(clock))
    h = RegistryHarness(registry=registry, ledger=ledger, advance=clock.advance)
    await h.publish()
    orphan = await h.prepare()
    await h.take_over()
    await h.publish()
    folder = tmp_path / orphan.path
    await ledger.restart()
    await registry.retain([], newest=9)
    assert is_there(folder)
    assert await ledger.confirm(2, (await registry.open(2))[0].content_hash)
    await registry.retain([], newest=9)
    assert not is_there(folder)


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
