"""What the kill tests judge by: a plan in which everything has its turn, and an audit that finds what it should."""

import msgspec
import pytest

from headrace.platform.records.delivery import ChainGroup
from headrace.platform.records.status import Fate
from headrace.platform.records.tables import FateRow, Receipt
from headrace.platform.records.versions import VersionManifest, VersionRef
from headrace.platform.store.tables import FateTable, ReceiptTable
from headrace.platform.testing.failpoints import FAILPOINTS
from headrace.platform.testing.kills.audit import audit, trained_twice
from headrace.platform.testing.kills.plan import GROUP, PARTS, kill_plan


class Root:
    """A run root in which versions consume episodes."""

    def __init__(self, folder) -> None:
        self.url = str(folder)
        (folder / "versions").mkdir()
        self._versions = folder / "versions"

    def version(self, number: int, parent: int | None, *trained: str, receipts=None, fates=None) -> None:
        """A version that trained these episodes; by default receipts and fates say the same."""
        manifest = VersionManifest(
            ref=VersionRef("policy", number),
            parent=parent,
            parent_hash="",
            kind="full",
            fence=1,
            batches=number,
            content_hash=str(number),
            path="",
            consumed=dict.fromkeys(trained, "trained"),
            groups=(ChainGroup(group=0, position=0, size=8, version=0, consumed_by=number, members=()),),
        )
        (self._versions / f"{number:06d}.json").write_bytes(msgspec.json.encode(manifest))
        told = trained if receipts is None else receipts
        ReceiptTable(self.url, "learner").append([Receipt(episode_id=e, version=number, advantages=()) for e in told])
        rows = trained if fates is None else fates
        FateTable(self.url, "driver").append([FateRow(episode_id=e, fate=Fate.TRAINED, version=number) for e in rows])


def summary(version: int, trained: int, dispatched: int | None = None) -> dict:
    rest = dict.fromkeys(("dropped", "failed", "cancelled", "in_flight"), 0)
    fates = {"dispatched": trained if dispatched is None else dispatched, "trained": trained, **rest}
    return {"version": version, "fates": fates}


@pytest.fixture
def root(tmp_path):
    return Root(tmp_path)


def test_a_clean_run(root):
    root.version(0, None)
    root.version(1, 0, "r.t0.0.0", "r.t0.1.0")
    root.version(2, 1, "r.t1.0.1")
    found = audit(root.url, summary(2, 3))
    assert found.holds and found.trained == 3


def test_another_attempt_of_a_slot_is_the_slot_again(root):  # P1
    root.version(0, None)
    root.version(1, 0, "r.t0.0.0")
    root.version(2, 1, "r.t0.0.1")
    assert trained_twice(root.url, 2) == {"manifests": ["t0.0"], "receipts": ["t0.0"], "fates": ["t0.0"]}
    assert not audit(root.url, summary(2, 2)).holds


def test_what_was_rolled_back_does_not_count(root):  # P6
    root.version(0, None)
    root.version(1, 0, "r.t0.0.0")
    root.version(2, 0, "r.t0.0.0")
    assert audit(root.url, summary(2, 1)).holds


def test_each_source_is_heard(root):
    root.version(0, None)
    root.version(1, 0, "r.t0.0.0", receipts=["r.t0.0.0", "r.t0.0.0"])
    assert trained_twice(root.url, 1) == {"manifests": [], "receipts": ["t0.0"], "fates": []}


@pytest.mark.parametrize("without", ["receipts", "fates"])
def test_sources_that_differ_are_told(root, without):
    root.version(0, None)
    root.version(1, 0, "r.t0.0.0", "r.t0.1.0", **{without: ["r.t0.0.0"]})
    assert audit(root.url, summary(1, 2)).unaccounted == ("r.t0.1.0",)


def test_a_ledger_that_counts_otherwise_is_told(root):
    root.version(0, None)
    root.version(1, 0, "r.t0.0.0")
    assert audit(root.url, summary(1, 2)).unaccounted == ("the ledger counts 2 trained attempts, the manifests 1",)


def test_the_lost_are_counted(root):  # P3
    root.version(0, None)
    assert audit(root.url, summary(0, 0, dispatched=5)).lost == 5


def test_a_torn_manifest_is_passed_over(root, tmp_path):
    root.version(0, None)
    (tmp_path / "versions" / "000001.json").write_text('{"ref": ')
    assert audit(root.url, summary(0, 0)).holds


def test_every_kind_has_its_turn():
    plan = kill_plan(0, 22, groups=4)
    assert {kill.kind for kill in plan} == {GROUP, *PARTS, *FAILPOINTS}
    assert sum(kill.kind == GROUP for kill in plan) == 4
    assert plan == kill_plan(0, 22, groups=4) != kill_plan(1, 22, groups=4)
