"""LoRA: what is trained and published, that an engine samples from the same weights, and resumes."""

import asyncio
import json

import numpy as np
import pytest
import torch
from learner_kit import World
from safetensors.torch import load
from test_packing import model_of
from test_torch_backend import batch, case
from torch_engine_kit import make_engine, request

from headrace.platform.config import GrpoConfig
from headrace.platform.config.learner import LearnerConfig, LoraConfig
from headrace.platform.errors import ConfigError, EngineError, NotFound, RunFailed
from headrace.platform.records.versions import ADAPTER, FULL, VersionManifest, VersionRef
from headrace.platform.registry.adapters import load_base_of
from headrace.platform.testing.conformance.backend import BACKEND_SUITE
from headrace.serving.adapters import add_adapter
from headrace.serving.replica import Replica
from headrace.trainer.algorithms import build_algorithm
from headrace.trainer.backends.torch import TorchBackend
from headrace.trainer.lora import first_files

LORA = LoraConfig(rank=4, alpha=8)


def config(lora: LoraConfig = LORA, **options) -> LearnerConfig:
    return LearnerConfig(**{"microbatch_tokens": 64, "lr": 1e-2, "warmup": 0, "lora": lora, **options})


def backend(family: str = "llama_gqa", lora: LoraConfig = LORA, **options) -> TorchBackend:
    return TorchBackend(model_of(family), config(lora, **options))


def trained(family: str = "llama_gqa", steps: int = 3, **options) -> TorchBackend:
    found, algorithm = backend(family, **options), build_algorithm(GrpoConfig())
    for step in range(steps):
        found.step(batch(step), algorithm)
    return found


def write(folder, files) -> str:
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return str(folder)


def version(number: int, kind: str, base_hash: str = "", policy: str = "tiny") -> VersionManifest:
    return VersionManifest(
        ref=VersionRef(policy, number, 1, f"a{number}" if base_hash else "", base_hash),
        parent=None,
        parent_hash="",
        fence=1,
        kind=kind,
        content_hash=f"hash-{number}",
        batches=number,
        path="",
    )


@pytest.mark.parametrize("check", BACKEND_SUITE.values(), ids=BACKEND_SUITE)
async def test_conformance(check):
    await check(case(lambda: backend(), lambda: build_algorithm(GrpoConfig())))


@pytest.mark.parametrize("family", ["llama_gqa", "qwen3", "gpt_neox", "gpt2"])
def test_only_adapters_are_trained_and_published(family):
    whole = TorchBackend(model_of(family), config(LoraConfig()))
    found = backend(family)
    for one, other in zip(found.logprobs(batch(0)), whole.logprobs(batch(0)), strict=True):
        np.testing.assert_array_equal(one, other)  # B is 0 at first
    assert found.base() == whole.weights()
    before = load(found.weights()["adapter_model.safetensors"])
    found.step(batch(0), build_algorithm(GrpoConfig()))
    assert found.base() == whole.weights()
    after = load(found.weights()["adapter_model.safetensors"])
    assert {name.rpartition(".lora_")[2] for name in after} == {"A.weight", "B.weight"}
    assert all(bool((after[name] != before[name]).any()) for name in after if "lora_B" in name)
    assert set(found.weights()) == {"adapter_config.json", "adapter_model.safetensors"}
    settings = json.loads(found.weights()["adapter_config.json"])
    assert (settings["r"], settings["lora_alpha"], settings["peft_type"]) == (4, 8, "LORA")


@pytest.mark.parametrize("family", ["llama_gqa", "gpt2"])
def test_what_is_published_is_what_peft_and_the_engine_make_of_it(family, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    found = trained(family)
    base, adapter = write(tmp_path / "base", found.base()), write(tmp_path / "adapter", found.weights())
    by_peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).merge_and_unload()
    by_us = AutoModelForCausalLM.from_pretrained(base)
    add_adapter(dict(by_us.named_parameters()), adapter)
    for merged in (by_peft, by_us):
        again = TorchBackend(merged.eval().requires_grad_(True), config(LoraConfig()))
        for one, other in zip(found.logprobs(batch(0)), again.logprobs(batch(0)), strict=True):
            np.testing.assert_allclose(one, other, atol=2e-5)


async def test_the_engine_holds_adapters_beside_their_base_and_samples_as_the_learner_computes(tmp_path):
    found, engine = backend(), make_engine()
    await engine.load(version(0, FULL), write(tmp_path / "0", found.base()))
    with pytest.raises(EngineError, match="does not hold its base"):
        await engine.load(version(1, ADAPTER, "hash-0"), str(tmp_path))
    await engine.load_base(version(0, FULL), str(tmp_path / "0"))
    assert engine.base_hash == "hash-0"
    for number in (1, 2):
        found.step(batch(number), build_algorithm(GrpoConfig()))
        await engine.load(version(number, ADAPTER, "hash-0"), write(tmp_path / str(number), found.weights()))
    await engine.retire(0)
    assert engine.versions() == [1, 2]
    generation = await engine.generate(request("s", [3, 4, 5, 6], version=2))
    assert generation.version_spans[0].version == version(2, ADAPTER, "hash-0").ref
    ids = [3, 4, 5, 6, *generation.token_ids.tolist()]
    with torch.no_grad():
        logits = found.model(torch.tensor([ids])).logits[0]
    expected = torch.log_softmax(logits, -1)[torch.arange(3, len(ids) - 1), torch.tensor(ids[4:])]
    np.testing.assert_allclose(generation.logprobs, expected.numpy(), atol=1e-4)
    await engine.close()


async def test_an_engine_that_comes_later_loads_the_base_for_itself(tmp_path):
    world = World(tmp_path, lora=LORA, publish_every=1, checkpoint_every=1, keep_versions=1)
    learner = world.learner(TorchBackend(model_of("llama_gqa"), world.config), build_algorithm(GrpoConfig()))
    await learner.start()
    for step in range(4):
        await world.play(2, version=step)
        await learner.step()
    manifests = await world.registry.manifests()
    assert [each.kind for each in manifests] == [FULL, *[ADAPTER] * 4]
    base = manifests[0]
    assert {each.ref.base_hash for each in manifests[1:]} == {base.content_hash}  # P6
    assert {each.ref.adapter_id for each in manifests[1:]} == {f"policy-{n}" for n in range(1, 5)}
    # Retention keeps the base: version 0 is old, and no checkpoint of it is left.
    with pytest.raises(NotFound):
        await world.registry.open(1)
    engine, changed = make_engine(policy_id="policy"), asyncio.Event()
    following = asyncio.create_task(Replica(engine, "r0").follow(world.registry, 1, changed.set))
    await asyncio.wait_for(changed.wait(), 30)
    assert engine.versions() == [4] and engine.base_hash == base.content_hash
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    await engine.close()


async def test_a_learner_that_died_before_its_checkpoint_leaves_the_newer_base_in_use(tmp_path, monkeypatch):
    """Its successor publishes the same base under another number (P6): that one is kept, and found."""
    world = World(tmp_path, lora=LORA, publish_every=1, checkpoint_every=1, keep_versions=1)

    def learner():
        return world.learner(TorchBackend(model_of("llama_gqa"), world.config), build_algorithm(GrpoConfig()))

    dead = learner()
    monkeypatch.setattr(dead, "_settle", lambda: (_ for _ in ()).throw(RunFailed("killed")))
    with pytest.raises(RunFailed):
        await dead.start()
    for last in (3, 6):
        alive = learner()
        await alive.start(takeover=True)
        while alive.steps < last:
            await world.play(2, version=alive.version)
            await alive.step()
        await alive.close()
    manifests = await world.registry.manifests()
    assert [each.kind for each in manifests[:3]] == [FULL, FULL, ADAPTER]
    assert manifests[0].content_hash == manifests[1].content_hash
    engine = make_engine(policy_id="policy")
    await load_base_of(engine, world.registry, manifests[-1])
    assert engine.base_hash == manifests[1].content_hash
    await engine.close()


async def test_an_adapter_whose_base_is_gone_is_not_loaded(tmp_path):
    world, engine = World(tmp_path), make_engine(policy_id="policy")
    with pytest.raises(NotFound, match="the base of policy@v4, some-hash"):
        await load_base_of(engine, world.registry, version(4, ADAPTER, "some-hash", "policy"))
    await engine.close()


def test_a_run_begins_with_whole_weights():
    found, whole = backend(), TorchBackend(model_of("llama_gqa"), config(LoraConfig()))
    assert first_files(found) == found.base() == first_files(whole) == whole.weights()


async def test_a_resumed_run_goes_on_with_the_adapters_over_the_same_base(tmp_path):
    world = World(tmp_path, lora=LORA, checkpoint_every=1)

    def learner():
        backend = TorchBackend(model_of("llama_gqa"), world.config)
        return backend, world.learner(backend, build_algorithm(GrpoConfig()))

    first, before = learner()
    await before.start()
    await world.play(2, version=0)
    await before.step()
    await before.close()
    second, after = learner()
    assert await after.start(takeover=True) == 1
    assert second.weights() == first.weights() and second.base() == first.base()
    await world.play(2, version=1)
    await after.step()
    newest = await world.registry.latest()
    base = (await world.registry.manifests())[0]
    assert (newest.kind, newest.ref.base_hash) == (ADAPTER, base.content_hash)


def test_the_same_steps_after_a_restore_give_the_same_adapters():
    algorithm = build_algorithm(GrpoConfig())
    one, other = trained(), backend()
    other.restore(one.save())
    assert one.step(batch(7), algorithm) == other.step(batch(7), algorithm)
    assert one.weights() == other.weights()


def test_adapters_of_another_rank_are_refused_at_a_restore():
    with pytest.raises(ValueError, match="another model or rank"):
        backend(lora=LoraConfig(rank=2)).restore(backend().save())


def test_the_reference_of_kl_is_the_base_below_the_adapters():
    """Not a copy: after steps its logprobs are still those of the first weights, and the adapters learn on."""
    algorithm = GrpoConfig(kl={"coefficient": 0.5})
    found = trained(algorithm=algorithm)
    whole = TorchBackend(model_of("llama_gqa"), config(LoraConfig(), algorithm=algorithm))
    (micro,) = found._microbatches(batch(0)[:2])
    with torch.no_grad():
        reference = found._reference.of(micro, micro.loss_mask).logprobs
        expected = whole._reference.of(micro, micro.loss_mask).logprobs
        present = found._token_logprobs.of(micro, micro.loss_mask).logprobs
    torch.testing.assert_close(reference, expected, atol=1e-6, rtol=0)
    assert float((present - reference).abs().max()) > 1e-3
    assert all(each.requires_grad for group in found._optimizer.param_groups for each in group["params"])


def test_recomputed_layers_and_bfloat16_go_with_adapters():
    plain = trained(steps=2)
    again = trained(steps=2, gradient_checkpointing=True)
    for one, other in zip(plain.logprobs(batch(0)), again.logprobs(batch(0)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    rounded = trained(steps=2, dtype="bfloat16")
    assert {t.dtype for t in load(rounded.weights()["adapter_model.safetensors"]).values()} == {torch.float32}


def test_targets_are_chosen_by_name_and_unknown_ones_named():
    found = backend(lora=LoraConfig(rank=2, targets=("q_proj", "v_proj")))
    names = load(found.weights()["adapter_model.safetensors"])
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in names} == {"q_proj", "v_proj"}
    with pytest.raises(ConfigError, match=r"no linear layer 'wq'.*it has down_proj, gate_proj"):
        backend(lora=LoraConfig(rank=2, targets=("wq",)))
    with pytest.raises(ConfigError, match="'lm_head' below its output layer"):
        backend(lora=LoraConfig(rank=2, targets=("lm_head",)))


@pytest.mark.parametrize(
    ("change", "message"),
    [({"use_dora": True}, "use_dora=True"), ({"r": None}, "cannot read the adapter"), ({"bias": "all"}, "bias='all'")],
)
def test_an_adapter_that_is_more_than_lora_is_refused_by_the_engine(change, message, tmp_path):
    found = backend()
    folder = write(tmp_path / "a", found.weights())
    settings = json.loads((tmp_path / "a" / "adapter_config.json").read_text()) | change
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(EngineError, match=message):
        add_adapter(dict(model_of("llama_gqa").named_parameters()), folder)


def test_an_adapter_for_another_model_is_refused_by_the_engine(tmp_path):
    folder = write(tmp_path / "a", backend().weights())
    with pytest.raises(EngineError, match="for which its base has no place"):
        add_adapter(dict(model_of("gpt_neox").named_parameters()), folder)
    with pytest.raises(EngineError, match="does not fit"):
        add_adapter(dict(model_of("llama").named_parameters()), folder)
