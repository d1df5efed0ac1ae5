"""Checkpoints are whole or they are not there."""

import msgspec
import pytest

from headrace.platform.errors import SchemaError
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
    with pytest.raises(SchemaError, match="schema 9"):
        store.latest_complete()
