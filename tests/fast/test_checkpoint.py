"""Checkpoints are whole or they are not there."""

import os
import signal
import subprocess
import sys

import fsspec
import msgspec
import pytest

from headrace.platform.errors import SchemaError
from headrace.platform.testing.failpoints import FOLDER_VARIABLE, arm
from headrace.trainer.checkpoint import CheckpointState, CheckpointStore

FILES = {"model.safetensors": b"weights", "optimizer.pt": b"moments"}


def state(version: int) -> CheckpointState:
    return CheckpointState(
        version=version, content_hash=f"h{version}", batches=2 * version, steps=version, dispatch_sequence=9
    )


@pytest.fixture
def store(tmp_path) -> CheckpointStore:
    checkpoints = CheckpointStore(str(tmp_path / "checkpoints"))
    for version in (5, 10):
        checkpoints.write(state(version), {name: data + str(version).encode() for name, data in FILES.items()})
    return checkpoints


@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_the_newest_comes_back_as_written(kind, tmp_path):
    store = CheckpointStore(f"file://{tmp_path}/c" if kind == "disk" else f"memory://{tmp_path.name}/c")
    assert store.latest_complete() is None
    store.write(state(5), FILES)
    store.write(state(1_000_000), FILES)
    assert store.latest_complete() == (state(1_000_000), FILES)


def damage(kind, folder):
    part = folder / "optimizer.pt"
    {
        "a part is missing": lambda: part.unlink(),
        "a part is cut": lambda: part.write_bytes(part.read_bytes()[:-1]),
        "a part is altered": lambda: part.write_bytes(b"X" * len(part.read_bytes())),
        "no manifest yet": lambda: (folder / "manifest.json").unlink(),
        "the manifest is cut": lambda: (folder / "manifest.json").write_bytes(b'{"schema_version": 1, "state": {'),
        "the manifest is empty": lambda: (folder / "manifest.json").write_bytes(b""),
    }[kind]()


@pytest.mark.parametrize(
    "kind",
    [
        "a part is missing",
        "a part is cut",
        "a part is altered",
        "no manifest yet",
        "the manifest is cut",
        "the manifest is empty",
    ],
)
def test_an_incomplete_checkpoint_is_passed_over(kind, store, tmp_path):
    """case Q16"""
    damage(kind, tmp_path / "checkpoints" / "000010")
    found = store.latest_complete()
    assert found is not None
    assert (found[0], found[1]["optimizer.pt"]) == (state(5), b"moments5")
    assert store.settled() == 5
    assert store.newest_state() == state(store.complete()[-1])
    assert store.complete() == ([5, 10] if kind == "a part is altered" else [5])


def test_a_write_that_breaks_off_leaves_no_checkpoint(store, monkeypatch):
    """case Q16: the process dies after the first part."""
    put, written = CheckpointStore._put, []

    def die_after_one(self, path, data):
        if written:
            raise OSError("the disk is gone")
        put(self, path, data)
        written.append(path)

    monkeypatch.setattr(CheckpointStore, "_put", die_after_one)
    with pytest.raises(OSError, match="gone"):
        store.write(state(15), FILES)
    assert store.latest_complete()[0].version == 10


def test_a_newer_schema_is_refused_by_name(store, tmp_path):
    path = tmp_path / "checkpoints" / "000010" / "manifest.json"
    manifest = msgspec.json.decode(path.read_bytes())
    path.write_bytes(msgspec.json.encode(manifest | {"schema_version": 9}))
    for look in (store.latest_complete, store.settled, store.complete):
        with pytest.raises(SchemaError, match="schema 9"):
            look()


def test_a_state_of_before_the_ranks_is_that_of_one(store, tmp_path):  # P13
    path = tmp_path / "checkpoints" / "000010" / "manifest.json"
    manifest = msgspec.json.decode(path.read_bytes())
    del manifest["state"]["world_size"]
    path.write_bytes(msgspec.json.encode(manifest))
    assert store.latest_complete()[0] == state(10)
    assert state(10).world_size == 1


def test_only_checkpoints_of_the_lineage_count(store):  # P6
    """Version 10 was completed by a learner that had been fenced off: whoever resumes leaves it aside."""
    assert store.latest_complete(among={0, 5, 11})[0].version == 5
    assert store.latest_complete(among=set()) is None


def test_nothing_is_settled_before_the_first(tmp_path):
    store = CheckpointStore(str(tmp_path / "none"))
    assert (store.settled(), store.complete(), store.retain(1)) == (None, [], [])
    assert store.newest_state() is None


@pytest.mark.parametrize("kind", ["disk", "memory"])
@pytest.mark.parametrize(("keep", "removed"), [(0, [5, 7, 10]), (1, [5, 7, 10]), (2, [5, 7]), (9, [7])])
def test_old_checkpoints_go_and_the_last_complete_one_never(kind, keep, removed, tmp_path):
    """P5, case Q16: 7 was left unfinished long ago, 15 is under way."""
    root = f"file://{tmp_path}/c" if kind == "disk" else f"memory://{tmp_path.name}/c"
    store = CheckpointStore(root)
    for version in (5, 7, 10, 12, 15):
        store.write(state(version), FILES)
    fs, path = fsspec.core.url_to_fs(root)
    for version in (7, 15):
        fs.rm_file(f"{path}/{version:06d}/manifest.json")
    assert store.retain(keep) == removed
    assert store.complete() == [version for version in (5, 10, 12) if version not in removed]
    assert store.settled() == 12
    assert fs.exists(f"{path}/000015/optimizer.pt")
    assert store.retain(keep) == []


def test_a_kill_between_two_parts_leaves_no_checkpoint(store, tmp_path):
    """case Q16: with a real process at the failpoint."""
    arm(tmp_path / "points", "between_shards")
    script = f"""
from headrace.trainer.checkpoint import CheckpointState, CheckpointStore
state = CheckpointState(version=15, content_hash="h", batches=1, steps=1, dispatch_sequence=0)
CheckpointStore({str(tmp_path / "checkpoints")!r}).write(state, {{"a": b"1", "b": b"2"}})
"""
    environment = {**os.environ, FOLDER_VARIABLE: str(tmp_path / "points")}
    ended = subprocess.run([sys.executable, "-c", script], env=environment, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert [path.name for path in (tmp_path / "checkpoints" / "000015").iterdir()] == ["a"]
    assert store.settled() == 10
    store.write(state(15), FILES)
    assert store.latest_complete() == (state(15), FILES)
