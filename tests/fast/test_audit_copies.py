"""The chains of a node are copied to a run root that lies elsewhere, now and then and at the end."""

import asyncio

import fsspec
import pytest

from headrace.actors.gateway.audit.log import AuditLog
from headrace.actors.gateway.place import GatewayPlace
from headrace.deploy import auditing
from headrace.deploy.auditing import AuditCopying, audit_report, ship_audit
from headrace.platform.store.run_root import RunRoot


@pytest.fixture
def root():
    fs = fsspec.filesystem("memory")
    yield RunRoot.create("memory://copies/runs", "a-run", "seed: 1\n")
    fs.rm("/copies", recursive=True)


@pytest.fixture
def place(tmp_path):
    return GatewayPlace(tmp_path / "home", tmp_path / "audit")


@pytest.fixture
def log(place):
    made = AuditLog(place.audit, 0.01)
    yield made
    made.close()


def entries(root):
    report = audit_report(root)
    assert report.holds
    return sum(chain.entries for chain in report.chains)


async def entry(log, number):
    log.append("decision", "run/0#a", f"k/{number}", "get", decision="allow")
    await log.durable()


async def test_what_is_new_is_copied_in_whole_lines(root, place, log, monkeypatch):
    ship_audit(root, GatewayPlace(place.home, place.audit / "none"))  # no gateway was ever here
    written = []
    monkeypatch.setattr(auditing, "write_atomic", lambda fs, path, data: written.append(path) or fs.pipe(path, data))
    await entry(log, 1)
    ship_audit(root, place)
    ship_audit(root, place)
    assert (entries(root), len(written)) == (1, 1)
    await entry(log, 2)
    chain = next(place.audit.glob("*.jsonl"))
    whole = chain.read_bytes()
    chain.write_bytes(whole[:-10])  # as it is seen while it is written
    ship_audit(root, place)
    assert entries(root) == 1
    chain.write_bytes(whole)
    ship_audit(root, place)
    assert (entries(root), len(written)) == (2, 2)


async def test_it_is_copied_while_the_run_goes_on(root, place, log, monkeypatch):
    copied, tries = asyncio.Event(), []
    loop = asyncio.get_running_loop()

    def ship(*args):
        tries.append(args)
        if len(tries) == 2:
            raise RuntimeError("the store is away")
        ship_audit(*args)
        loop.call_soon_threadsafe(copied.set)

    monkeypatch.setattr(auditing, "ship_audit", ship)
    copying = AuditCopying(root, place, every_s=0.01)
    await entry(log, 1)
    copying.start()
    async with asyncio.timeout(10.0):
        await copied.wait()
        assert entries(root) == 1
        await entry(log, 2)
        while entries(root) < 2:  # noqa: ASYNC110 - a try fails between
            await asyncio.sleep(0.01)
    assert len(tries) > 2
    copying._task.cancel()
    await asyncio.wait({copying._task})
    await entry(log, 3)
    assert entries(root) == 2
    await copying.close()
    assert entries(root) == 3


async def test_a_run_root_on_a_local_disk_has_them_already(tmp_path, place):
    copying = AuditCopying(RunRoot.create(str(tmp_path / "runs"), "a-run", "seed: 1\n"), place)
    copying.start()
    assert copying._task is None
    await copying.close()
