"""Files of a version on a local disk: written in pieces, and checked several at a time (P8)."""

from pathlib import Path

import pytest

from headrace.platform.errors import RegistryError
from headrace.platform.registry.blobs import BlobStore
from headrace.platform.registry.hashing import file_hashes

PIECE = 1 << 17
FILES = {
    "empty": b"",
    "small": b"x",
    "one-piece": bytes(range(256)) * (PIECE // 256),
    "more": b"abc" * PIECE,
    "another": b"tokens",
    "last": b"\0" * (PIECE + 1),
}


@pytest.fixture
def store(tmp_path) -> BlobStore:
    written = BlobStore(str(tmp_path))
    written.write_folder("versions/f0001-v000000", FILES)
    return written


def folder(store):
    return store.full("versions/f0001-v000000")


def test_every_file_is_whole(store):
    assert {name: store.read(f"versions/f0001-v000000/{name}") for name in FILES} == FILES


def test_it_is_checked_where_it_lies(store):
    assert store.verify("versions/f0001-v000000", file_hashes(FILES)) == folder(store)


@pytest.mark.parametrize("name", FILES)
def test_an_altered_file_is_named(store, name):
    with (Path(folder(store)) / name).open("ab") as file:
        file.write(b"!")
    with pytest.raises(RegistryError, match=f"/{name} is torn or altered"):
        store.verify("versions/f0001-v000000", file_hashes(FILES))


def test_a_missing_file_is_named(store):
    with pytest.raises(RegistryError, match="/weights is missing"):
        store.verify("versions/f0001-v000000", {**file_hashes(FILES), "weights": ""})
