"""A step that is not finite is kept for study: what is written, where, and that it suffices to take the step again."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from learner_kit import RUN, World, tiny_backend

from headrace.platform.config import GrpoConfig
from headrace.platform.errors import RunFailed
from headrace.platform.records.codec import episode_codec
from headrace.platform.store.files import open_url
from headrace.platform.testing.fakes.learning import FakeAlgorithm, FakeBackend
from headrace.trainer.algorithms import build_algorithm
from headrace.trainer.backends.torch import TorchBackend
from headrace.trainer.bad_step import BadSteps
from headrace.trainer.model import load_folder
from headrace.trainer.samples import build_samples


class Poison(FakeAlgorithm):
    def advantages(self, group):
        return [[math.nan, 0.5] if one.score == 1.0 else [0.0, 0.0] for one in group]


async def failed_step(world: World, learner) -> str:
    await learner.start()
    await world.play(2, version=0)
    with pytest.raises(RunFailed, match=r"not finite.*test-run\.t0\.0\.0") as caught:
        await learner.step()
    return str(caught.value)


async def test_the_folder_holds_weights_episodes_and_what_was_about_to_be_done(tmp_path):
    world = World(tmp_path)
    message = await failed_step(world, world.learner(FakeBackend(), Poison(), on_bad_step=BadSteps(str(tmp_path)).keep))
    folder = tmp_path / "bad_steps" / "000001"
    assert message.endswith(f"Batch and weights are kept in {folder}")
    assert np.frombuffer((folder / "weights" / "model.safetensors").read_bytes()) == FakeBackend().weight
    for path in (folder / "episodes").iterdir():
        assert path.read_bytes() == world.stored[path.stem], path.name
    assert len(list((folder / "episodes").iterdir())) == 4
    step = json.loads((folder / "step.json").read_text())
    assert (step["step"], step["version"], step["ahead"]) == (1, 0, 0)
    assert "not finite" in step["error"] and step["config"] == world.config.model_dump(mode="json")
    member = step["groups"][0]["members"][0]
    assert (member["episode_id"], member["score"], member["lag"]) == (f"{RUN}.t0.0.0", 1.0, 0)
    assert member["advantages"] == [None, 0.5]  # JSON has no NaN
    # Tokens 0-2 prompt, 3-5 sampled, 6 a tool's, 7-8 sampled.
    (sample,) = member["samples"]
    assert sample["tokens"] == 9 and sample["action_mask"] == sample["loss_mask"] == [[3, 6], [7, 9]]


async def test_the_same_step_failing_again_writes_beside_the_first_one(tmp_path):
    keep = BadSteps(str(tmp_path)).keep
    for name in ("one", "two"):
        world = World(tmp_path / name)
        message = await failed_step(world, world.learner(FakeBackend(), Poison(), on_bad_step=keep))
    assert message.endswith("000001-2")
    assert sorted(path.name for path in (tmp_path / "bad_steps").iterdir()) == ["000001", "000001-2"]


async def test_any_file_system_will_do(tmp_path):
    root = f"memory://{tmp_path.name}"
    world = World(tmp_path)
    message = await failed_step(world, world.learner(FakeBackend(), Poison(), on_bad_step=BadSteps(root).keep))
    fs, path = open_url(root)
    assert f"memory://{path}/bad_steps/000001" in message
    assert fs.exists(f"{path}/bad_steps/000001/step.json")


async def test_a_full_disk_does_not_hide_why_the_run_ends(tmp_path):
    def full(bad):
        raise OSError("no space left")

    world = World(tmp_path)
    message = await failed_step(world, world.learner(FakeBackend(), Poison(), on_bad_step=full))
    assert message.endswith("They could not be kept for study: OSError: no space left")


async def test_the_step_can_be_taken_again_from_the_folder(tmp_path):
    """From the kept weights and episodes the real backend finds the same loss as from those in memory."""

    class Scaled(Poison):
        def loss(self, logprobs, batch):
            return build_algorithm(GrpoConfig()).loss(logprobs, batch)

    world = World(tmp_path)
    backend = tiny_backend(world.config)
    await failed_step(world, world.learner(backend, Scaled(), on_bad_step=BadSteps(str(tmp_path)).keep))
    folder: Path = tmp_path / "bad_steps" / "000001"
    again = TorchBackend(load_folder(folder / "weights"), world.config)
    step = json.loads((folder / "step.json").read_text())
    kept, played = [], []
    for member in (member for group in step["groups"] for member in group["members"]):
        name = member["episode_id"]
        credit = [0.25 if value is None else value for value in member["advantages"]]
        payload = (folder / "episodes" / f"{name}.msgpack").read_bytes()
        kept += build_samples(episode_codec.decode(payload), credit)
        played += build_samples(episode_codec.decode(world.stored[name]), credit)
    algorithm = build_algorithm(GrpoConfig())
    assert dict(again.step(kept, algorithm)) == dict(backend.step(played, algorithm))
