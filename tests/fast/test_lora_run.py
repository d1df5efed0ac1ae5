"""A run that trains adapters, from the recipe to what people do with its versions, in this process."""

import json

import numpy as np
import pytest
from run_kit import RECIPES, run_inprocess, small_config, stored

from headrace.deploy.checks import check_config
from headrace.deploy.export import export_version
from headrace.deploy.stored_version import open_version
from headrace.platform.config.load import load_recipe
from headrace.platform.errors import ConfigError
from headrace.platform.observability.metrics import read_metrics
from headrace.platform.observability.names import Metric
from headrace.platform.records.versions import ADAPTER, FULL
from headrace.platform.store.tables import ReceiptTable

LORA = (
    "learner.lora.rank=8",
    "learner.lr=5e-3",
    "learner.algorithm.kl.coefficient=0.01",
    "learner.environment_loss.coefficient=0.01",
)


@pytest.fixture(scope="module")
def run(lookup_model, tmp_path_factory):
    """One finished run: its summary and its root."""
    return run_inprocess(small_config(lookup_model, tmp_path_factory.mktemp("runs"), *LORA))


def test_engine_and_learner_see_the_same_weights(run):
    """Episodes of adapter versions are trained at a ratio of 1, as those of whole weights are."""
    summary, root = run
    found = [record[Metric.LOGPROB_GAP] for record in read_metrics(root.metrics) if Metric.LOSS in record]
    assert [name for gaps in found for name in gaps] == ["inprocess@0", "inprocess@1", "inprocess@2"]
    assert max(gap for gaps in found for gap in gaps.values()) < 1e-4
    versions = {turn.oldest_version for episode in stored(root) for turn in episode.turns if turn.is_action}
    assert len(versions) > 1 and summary["learner_steps"] == 3
    assert {row.version for row in ReceiptTable(root.url).rows()} == {1, 2, 3}


def test_what_tools_send_is_learned_beside(run):
    _, root = run
    found = [record[Metric.ENVIRONMENT_LOSS] for record in read_metrics(root.metrics) if Metric.LOSS in record]
    assert len(found) == 3 and all(0 < each < 20 for each in found)  # nats; a model that knows nothing has log(144) = 5


async def test_the_newest_version_is_an_adapter_and_opens_as_a_whole_model(run):
    from headrace.trainer.model import load_folder

    _, root = run
    manifest, adapter = await open_version(root, "latest", as_stored=True)
    first, base = await open_version(root, "0")
    assert (first.kind, manifest.kind, manifest.ref.base_hash) == (FULL, ADAPTER, first.content_hash)
    merged_manifest, merged = await open_version(root, "latest")
    assert (merged_manifest.kind, merged_manifest.ref) == (FULL, manifest.ref)
    assert (await open_version(root, "latest"))[1] == merged
    one, other = load_folder(merged).state_dict(), load_folder(base).state_dict()
    moved = {name for name, tensor in one.items() if bool((tensor != other[name]).any())}
    assert moved and all("proj" in name for name in moved)
    assert (merged / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    assert {path.name for path in adapter.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}


async def test_an_adapter_is_exported_as_one_or_merged_to_what_the_engine_runs(run, tmp_path):
    import asyncio

    from headrace.trainer.model import load_folder

    _, root = run
    exported = await asyncio.to_thread(export_version, root, "latest", tmp_path / "adapter")
    assert "adapter_model.safetensors" in exported.files and "config.json" not in exported.files
    await asyncio.to_thread(export_version, root, "latest", tmp_path / "merged", merge=True)
    by_peft, by_us = load_folder(tmp_path / "merged"), load_folder((await open_version(root, "latest"))[1])
    for name, tensor in by_us.state_dict().items():
        np.testing.assert_allclose(by_peft.state_dict()[name].numpy(), tensor.numpy(), atol=1e-6, err_msg=name)


def test_the_checkpoint_holds_adapters_only(run):
    _, root = run
    folder = max(root.local("checkpoints").iterdir())
    parts = json.loads((folder / "manifest.json").read_text())["parts"]
    assert "adapter_model.safetensors" in parts and "model.safetensors" not in parts


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("learner.lora.rank=8", "serving.engine=vllm"), "set both"),
        (("serving.engine=vllm", "serving.vllm.adapters=4"), "set both"),
        (("learner.lora.rank=32", "serving.engine=vllm", "serving.vllm.adapters=4"), "max_lora_rank=16"),
        (
            ("learner.lora.rank=8", "serving.engine=vllm", "serving.vllm.adapters=4", "serving.transport=nccl"),
            "sends whole weights",
        ),
        (("learner.lora.rank=8", "learner.backend=deepspeed"), "trains whole weights"),
    ],
)
def test_what_cannot_go_together_is_refused_before_anything_starts(changes, message):
    with pytest.raises(ConfigError, match=message):
        check_config(load_recipe("lookup", changes, RECIPES))
