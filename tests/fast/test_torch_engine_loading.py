"""Loading versions: what is refused leaves everything as it was."""

import json
import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch_engine_kit import assert_logprobs, make_engine, manifest, play, request, save_model

from headrace.platform.errors import EngineDead, EngineError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return Path(save_model(tmp_path_factory.mktemp("model"), 0))


def truncate(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def drop_a_tensor(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def shrink_a_tensor(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def change_vocabulary(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    config["vocab_size"] += 1
    (path / "config.json").write_text(json.dumps(config))


def lose_the_config(path: Path) -> None:
    (path / "config.json").unlink()


FAULTS = [truncate, drop_a_tensor, shrink_a_tensor, change_vocabulary, lose_the_config]


@pytest.mark.parametrize("break_it", FAULTS)
async def test_a_broken_version_changes_nothing(tmp_path, folder, break_it):  # case S4
    broken = Path(shutil.copytree(folder, tmp_path / "broken"))
    break_it(broken)
    engine = make_engine()
    await engine.load(manifest(0), str(folder))
    before = await play(engine, "a", 2)
    with pytest.raises(EngineError, match="broken"):
        await engine.load(manifest(1), str(broken))
    assert list(engine.versions()) == [0]
    await engine.release("a")
    assert (await play(engine, "a", 2)).ids == before.ids
    await engine.load(manifest(1), str(folder))
    assert list(engine.versions()) == [0, 1]
    await engine.close()


@pytest.mark.parametrize("break_it", [truncate, drop_a_tensor, lose_the_config])
async def test_a_broken_first_version_is_refused_too(tmp_path, folder, break_it):
    broken = Path(shutil.copytree(folder, tmp_path / "broken"))
    break_it(broken)
    engine = make_engine()
    with pytest.raises(EngineError, match="broken"):
        await engine.load(manifest(0), str(broken))
    assert list(engine.versions()) == []
    await engine.load(manifest(0), str(folder))
    await engine.close()


async def test_half_precision_files_are_widened(tmp_path, folder):
    narrow = Path(shutil.copytree(folder, tmp_path / "narrow"))
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, narrow / "model.safetensors", {"format": "pt"})
    engine = make_engine()
    await engine.load(manifest(0), str(folder))
    await engine.load(manifest(1), str(narrow))
    assert_logprobs(str(narrow), [await play(engine, "a", 2, version=1)], 1.0)
    await engine.close()


async def test_other_policies_and_other_content_are_refused(folder):
    engine = make_engine()
    await engine.load(manifest(0), str(folder))
    await engine.load(manifest(0), str(folder))
    with pytest.raises(EngineError, match="policy"):
        await engine.load(manifest(1, policy_id="other"), str(folder))
    with pytest.raises(EngineError, match="content"):
        await engine.load(msgspec.structs.replace(manifest(0), content_hash="altered"), str(folder))
    await engine.close()


async def test_more_positions_than_the_model_has_are_refused(folder):
    engine = make_engine(max_positions=65)
    with pytest.raises(EngineError, match="65"):
        await engine.load(manifest(0), str(folder))
    await engine.close()


async def test_weights_that_are_not_finite_spoil_no_other_session(tmp_path, folder):
    bad = Path(shutil.copytree(folder, tmp_path / "bad"))
    tensors = load_file(bad / "model.safetensors")
    tensors["model.layers.0.self_attn.v_proj.weight"][:] = torch.nan
    save_file(tensors, bad / "model.safetensors", {"format": "pt"})
    engine = make_engine(max_sessions=1)
    await engine.load(manifest(0), str(folder))
    await engine.load(manifest(1), str(bad))
    with pytest.raises(EngineError, match="not finite"):
        await engine.generate(request("a", [1, 2, 3, 4, 5, 6, 7, 8, 9], version=1))
    assert_logprobs(str(folder), [await play(engine, "b", 0)], 1.0)
    await engine.close()


async def test_nothing_loads_into_a_closed_engine(folder):
    engine = make_engine(inline=False)
    await engine.close()
    with pytest.raises(EngineDead):
        await engine.load(manifest(0), str(folder))
