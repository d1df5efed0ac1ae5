"""Which model folders and adapters are let in, before anything of a running engine changes (case S4)."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from headrace.platform.errors import EngineError
from headrace.platform.records.versions import VersionManifest, VersionRef
from headrace.serving.vllm_weights import FileWeights, check_adapter, check_kind, read_layout, vocabulary_of

CONFIG = {"model_type": "llama", "vocab_size": 61, "hidden_size": 4}
TENSORS = {"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.float32)}


def save(folder: Path, config=CONFIG, tensors=TENSORS, name: str = "model.safetensors") -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / name)
    return str(folder)


@pytest.fixture
def weights(tmp_path) -> FileWeights:
    """The model that runs is in the folder "old"."""
    weights = FileWeights()
    weights.check(save(tmp_path / "old"))
    return weights


def test_other_values_and_another_way_to_shard_are_taken(weights, tmp_path):
    config = {**CONFIG, "transformers_version": "99", "dtype": "bfloat16"}
    weights.check(save(tmp_path / "new", config, {name: tensor + 1 for name, tensor in TENSORS.items()}))
    save(tmp_path / "shards", tensors={"a": TENSORS["a"]})
    weights.check(save(tmp_path / "shards", tensors={"b": TENSORS["b"]}, name="more.safetensors"))
    assert read_layout(str(tmp_path / "shards")) == {"a": ("F32", (2, 3)), "b": ("F32", (4,))}


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({"a": TENSORS["a"]}, "b"),
        ({**TENSORS, "c": TENSORS["a"]}, "c"),
        ({**TENSORS, "b": np.zeros(5, np.float32)}, "b"),
        ({**TENSORS, "b": np.zeros(4, np.float16)}, "b"),
    ],
)
def test_other_tensors_are_refused_by_name_and_the_next_good_folder_is_taken(weights, tmp_path, tensors, named):
    with pytest.raises(EngineError, match=f"other tensors.*'{named}'"):
        weights.check(save(tmp_path / "new", tensors=tensors))
    weights.check(str(tmp_path / "old"))


def test_another_architecture_is_refused(weights, tmp_path):
    with pytest.raises(EngineError, match="another architecture"):
        weights.check(save(tmp_path / "new", {**CONFIG, "hidden_size": 8}))


def test_torn_and_missing_files_are_refused(weights, tmp_path):
    torn = save(tmp_path / "torn")
    os.truncate(tmp_path / "torn" / "model.safetensors", 100)
    bare = save(tmp_path / "bare")
    (tmp_path / "bare" / "model.safetensors").unlink()
    broken = save(tmp_path / "broken")
    (tmp_path / "broken" / "config.json").write_text("[]")
    for folder in (torn, bare, broken, str(tmp_path / "none")):
        with pytest.raises(EngineError, match=Path(folder).name):
            weights.check(folder)


async def test_the_workers_are_told_to_read_the_folder():
    calls = []

    async def rpc(method, **arguments):
        calls.append((method, arguments))

    await FileWeights().update(rpc, "new")
    assert calls == [("take_up_weights", {"weights_path": "new"})]


def test_the_vocabulary_is_the_text_models(tmp_path):
    assert vocabulary_of(save(tmp_path / "plain")) == 61
    assert vocabulary_of(save(tmp_path / "nested", {"text_config": {"vocab_size": 7}})) == 7
    with pytest.raises(EngineError, match="vocab_size"):
        vocabulary_of(save(tmp_path / "none", {}))


def manifest(number: int, kind: str = "adapter", adapter_id: str = "a", base_hash: str = "base") -> VersionManifest:
    return VersionManifest(
        ref=VersionRef("tiny", number, adapter_id=adapter_id, base_hash=base_hash),
        parent=None,
        parent_hash="",
        fence=1,
        kind=kind,
        content_hash="base" if kind == "full" else f"hash-{number}",
        batches=0,
        path="",
    )


BASE = manifest(0, "full", "", "")


@pytest.fixture
def adapter(tmp_path) -> str:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4}))
    save_file(TENSORS, folder / "adapter_model.safetensors")
    return str(folder)


def test_an_adapter_of_this_base_is_taken(adapter):
    check_adapter(manifest(1), adapter, BASE, max_rank=4)


def test_other_adapters_are_refused(adapter, tmp_path):
    refused = {
        "another base": (manifest(1, base_hash="other"), adapter, 4),
        "no adapter": (manifest(1, kind="full"), adapter, 4),
        "is no adapter": (manifest(1, adapter_id=""), adapter, 4),
        "max_lora_rank is 2": (manifest(1), adapter, 2),
        "cannot read the adapter": (manifest(1), str(tmp_path), 4),
    }
    torn = shutil.copytree(adapter, tmp_path / "torn")
    os.truncate(torn / "adapter_model.safetensors", 50)
    refused["cannot read the tensors"] = (manifest(1), str(torn), 4)
    for message, (wrong, folder, rank) in refused.items():
        with pytest.raises(EngineError, match=message):
            check_adapter(wrong, folder, BASE, rank)
    with pytest.raises(EngineError, match=r"serving\.vllm\.adapters"):
        check_kind(manifest(1).ref, "adapter")
