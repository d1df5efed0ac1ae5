"""The critic: conformance of a learner that has one, exactness over microbatches, warm-up, and its checkpoint."""

import dataclasses
import logging

import numpy as np
import pytest
import torch
from learner_kit import World
from transformers import GraniteConfig, GraniteForCausalLM

from headrace.platform.config import LearnerConfig, PpoConfig, TinyLlamaConfig
from headrace.platform.errors import ConfigError
from headrace.platform.records import f32, i32
from headrace.platform.testing.conformance.backend import BACKEND_SUITE, BackendCase
from headrace.trainer.algorithms import build_algorithm
from headrace.trainer.backends.torch import TorchBackend
from headrace.trainer.critic import CRITIC_FILE, CRITIC_OPTIMIZER_FILE
from headrace.trainer.forward import TokenLogprobs
from headrace.trainer.model import build_tiny_llama
from headrace.trainer.samples import CriticColumns, Sample

TINY = TinyLlamaConfig(hidden=32, layers=2, heads=2, intermediate=32, max_positions=64)
VOCAB = 24
SHARED = 4


def tiny():
    return build_tiny_llama(TINY, VOCAB, 0, pad_token_id=0, eos_token_id=1)


def config(learner=None, **critic) -> LearnerConfig:
    return LearnerConfig(
        algorithm=PpoConfig(critic=critic), **{"microbatch_tokens": 64, "lr": 1e-2, "warmup": 0, **(learner or {})}
    )


def backend(learner=None, **critic) -> TorchBackend:
    return TorchBackend(tiny(), config(learner, **critic))


def algorithm(**critic):
    return build_algorithm(PpoConfig(critic=critic))


def sample(name: str, length: int, seed: int) -> Sample:
    """Begins as all others do; the critic is trained on the states before some of the loss tokens."""
    rng = np.random.default_rng([seed, length])
    mask = np.zeros(length, np.uint8)
    mask[SHARED:] = rng.integers(0, 2, length - SHARED)
    mask[-1] = 1
    begins = mask * rng.integers(0, 2, length).astype(np.uint8)
    begins[-1] = 1
    return Sample(
        episode_id=name,
        agent_id="",
        segment=0,
        lag=0,
        token_ids=i32([*range(2, 2 + SHARED), *rng.integers(0, VOCAB, length - SHARED)]),
        action_mask=mask,
        loss_mask=mask,
        behaviour_logprobs=f32(mask * -rng.uniform(2.5, 3.5, length)),
        advantages=f32(mask * rng.normal(size=length)),
        temperatures=f32([1.0] * length),
        critic=CriticColumns(values=f32(np.zeros(length)), targets=f32(rng.normal(size=length)), mask=begins),
    )


def batch(seed: int) -> list[Sample]:
    return [sample(f"run.t{seed}.{n}.0", 6 + 3 * n, seed) for n in range(6)]


def poisoned(seed: int) -> list[Sample]:
    """One episode has a target that is no number."""
    first, *rest = batch(seed)
    targets = f32(np.where(first.critic.mask == 1, np.nan, 0))
    bad = dataclasses.replace(first.critic, targets=targets)
    advantages = f32(np.where(first.loss_mask == 1, np.nan, 0))
    return [dataclasses.replace(first, episode_id="run.t9.9.9", critic=bad, advantages=advantages), *rest]


CRITICS = {
    "head": {},
    "detached": {"detach": True},
    "model": {"kind": "model"},
    "epochs": {"epochs": 3},
    "model_epochs": {"kind": "model", "epochs": 2},
}


@pytest.mark.parametrize("check", BACKEND_SUITE.values(), ids=BACKEND_SUITE)
@pytest.mark.parametrize("critic", CRITICS.values(), ids=CRITICS)
async def test_conformance(critic, check):
    await check(
        BackendCase(
            backend=lambda: backend(**critic),
            algorithm=lambda: algorithm(**critic),
            batch=batch,
            poisoned=poisoned,
            reorder=lambda samples: samples[::-1],
            lengths=lambda samples: [each.length for each in samples],
            bad_episode="run.t9.9.9",
        )
    )


def test_a_new_critic_says_nothing():
    assert all(not values.any() for values in backend().values(batch(0)))


@pytest.mark.parametrize("critic", CRITICS.values(), ids=CRITICS)
@pytest.mark.parametrize("split", [{"microbatch_tokens": 16}, {"share_prefixes": False}], ids=str)
def test_microbatches_and_packing_change_nothing(critic, split):
    """case V6: the same step in more microbatches, or without shared beginnings: the same critic and policy."""
    whole, parts = backend({"microbatch_tokens": 512}, **critic), backend(split, **critic)
    for seed in range(2):
        one, other = (each.step(batch(seed), algorithm(**critic)) for each in (whole, parts))
        assert one == pytest.approx(other, abs=1e-5)
    for before, after in zip(whole.values(batch(0)), parts.values(batch(0)), strict=True):
        np.testing.assert_allclose(before, after, atol=1e-4)


def test_padded_rows_have_the_same_values():
    """What stands in the padding has no value, and none is given."""
    packed = backend()
    packed.step(batch(0), algorithm())
    padded = backend()
    padded.restore(packed.save())
    padded._token_logprobs.why_padded = "asked for"
    for one, other in zip(packed.values(batch(1)), padded.values(batch(1)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_a_value_is_that_of_the_state_after_the_token():
    """The head over the decoder's states, sample by sample: values f32[T], the last one after all tokens."""
    learner = backend()
    learner.step(batch(0), algorithm())
    head = learner._critic._head
    for one, found in zip(batch(0), learner.values(batch(0)), strict=True):
        ids = torch.from_numpy(one.token_ids.astype(np.int64))[None]
        with torch.no_grad():
            expected = head(learner.model.base_model(input_ids=ids).last_hidden_state)[0, :, 0]
        np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)


@pytest.mark.parametrize("kind", ["head", "model"])
def test_it_learns_its_targets(kind):
    learner, losses = backend(kind=kind, lr=1e-2, clip=10.0), []
    for _ in range(30):
        losses.append(learner.step(batch(0), algorithm(kind=kind, clip=10.0))["value_loss"])
    targets = np.concatenate([each.critic.targets[each.critic.mask == 1] for each in batch(0)])
    assert losses[0] == pytest.approx(float((targets**2).mean()) / 2, rel=1e-5)  # a mean over states, of zeros
    assert losses[-1] < losses[0] / 4


def test_the_clip_ends_what_later_epochs_gain():
    """Ten epochs at once: a value goes as far as the clip, and not much further."""
    near, far = (backend(epochs=10, lr=1e-2, clip=clip, detach=True) for clip in (0.05, 10.0))
    for each in (near, far):
        each.step(batch(0), algorithm(detach=True))
    moved = [np.abs(np.concatenate(each.values(batch(0)))).max() for each in (near, far)]
    assert moved[0] < moved[1] / 2


def test_in_warm_up_only_the_critic_learns():
    learner = backend(warmup=2)
    before = learner.weights()
    values = []
    for seed in range(3):
        learner.step(batch(seed), algorithm())
        values.append(np.concatenate(learner.values(batch(0))))
        assert (learner.weights() == before) is (seed < 2)
    assert np.abs(values[0]).max() > 0
    assert np.abs(values[1] - values[0]).max() > 0


def test_warm_up_goes_on_after_a_resume():
    learner, again = backend(warmup=2), backend(warmup=2)
    learner.step(batch(0), algorithm())
    again.restore(learner.save())
    before = again.weights()
    again.step(batch(1), algorithm())
    assert again.weights() == before
    again.step(batch(2), algorithm())
    assert again.weights() != before


@pytest.mark.parametrize(("critic", "reached"), [({}, True), ({"detach": True}, False), ({"kind": "model"}, False)])
def test_how_far_the_value_loss_reaches(critic, reached):
    """Without advantages only the value loss has a gradient: it moves the policy where the head sits on its states."""
    learner = backend(**critic)
    before = learner.weights()
    silent = [dataclasses.replace(each, advantages=f32(np.zeros(each.length))) for each in batch(0)]
    for _ in range(2):  # the first moves the head off 0, through which nothing flows back
        learner.step(silent, algorithm(**critic))
    assert (learner.weights() != before) is reached


@pytest.mark.parametrize("kind", ["head", "model"])
def test_its_part_of_the_checkpoint(kind):
    learner = backend(kind=kind)
    learner.step(batch(0), algorithm(kind=kind))
    files = learner.save()
    assert {CRITIC_FILE, CRITIC_OPTIMIZER_FILE} == set(files) - set(TorchBackend(tiny(), LearnerConfig()).save())
    assert CRITIC_FILE not in learner.weights()
    again = backend(kind=kind)
    again.restore(files)
    for one, other in zip(learner.values(batch(1)), again.values(batch(1)), strict=True):
        assert one.tolist() == other.tolist()


def test_a_checkpoint_without_critic_is_named(caplog):
    files = TorchBackend(tiny(), LearnerConfig()).save()
    with caplog.at_level(logging.WARNING):
        backend().restore(files)
    assert "the checkpoint holds no critic" in caplog.text


def test_a_critic_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="the weights lack"):
        backend(kind="model").restore(backend().save())


def test_without_a_critic_states_have_no_values():
    with pytest.raises(ValueError, match="has no critic"):
        TorchBackend(tiny(), LearnerConfig()).values(batch(0))


def test_logits_that_are_more_than_the_output_layer():
    """The policy's pass does not select hidden states then; the critic takes them from the decoder."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    shape = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    gemma = {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 32, "final_logit_softcapping": 5.0}
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(Gemma2Config(**shape, **gemma, pad_token_id=0, bos_token_id=None, eos_token_id=1))
    learner = TorchBackend(model, config())
    learner.step(batch(0), algorithm())
    assert np.abs(np.concatenate(learner.values(batch(0)))).max() > 0


def granite():
    """Its logits are more than the output layer, so that hidden states are not at hand."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
    special = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    sizes = {"intermediate_size": 32, "vocab_size": VOCAB, "max_position_embeddings": 64}
    return GraniteForCausalLM(GraniteConfig(**shape, **sizes, **special, logits_scaling=8.0))


@pytest.mark.parametrize("model", [tiny, granite], ids=["tiny", "granite"])
def test_a_detached_critic_never_reaches_the_policy(model):
    weights = []
    for coefficient in (0.5, 50.0):
        one = TorchBackend(model(), config({"clip_grad": 1e9}, detach=True, coefficient=coefficient))
        with torch.no_grad():
            one._critic._head.weight.fill_(1.0)
        one.step(batch(0), algorithm(detach=True, coefficient=coefficient))
        weights.append(torch.cat([each.flatten() for each in one.model.state_dict().values()]))
    assert torch.equal(*weights)


def test_a_later_epoch_that_is_not_finite_changes_nothing():
    one = backend(epochs=3, lr=1e20, clip=1e30)
    before = one.save()
    with pytest.raises(ArithmeticError, match=r"learner step 1: the critic's gradient.*run\.t0\.0\.0"):
        one.step(batch(0), algorithm(epochs=3))
    after = one.save()
    assert (after["model.safetensors"], after[CRITIC_FILE]) == (before["model.safetensors"], before[CRITIC_FILE])


def test_the_policys_schedule_begins_after_the_warm_up():
    one = backend({"warmup": 2, "lr": 1e-2}, warmup=2)
    rates = [one.step(batch(n), algorithm(warmup=2))["lr"] for n in range(4)]
    assert rates == pytest.approx([0.0, 0.0, 5e-3, 1e-2])


def test_a_resume_takes_up_changed_settings():
    one = backend(lr=1e-3)
    one.step(batch(0), algorithm())
    other = backend({"betas": (0.5, 0.6), "weight_decay": 0.1}, lr=1e-5)
    other.restore(one.save())
    for optimizer in (other._optimizer, other._critic._optimizer):
        assert [(group["betas"], group["weight_decay"]) for group in optimizer.param_groups] == [((0.5, 0.6), 0.1)]
    assert other._critic._optimizer.param_groups[0]["lr"] == 1e-5


def test_a_model_without_states_is_refused(monkeypatch):
    monkeypatch.setattr(TokenLogprobs, "_has_states", lambda self: False)
    with pytest.raises(ConfigError, match="LlamaForCausalLM does not give"):
        backend()


async def test_two_and_two_steps_are_four(tmp_path):
    """A run that is resumed from its checkpoint goes on exactly: receipts and weights are those of one that was not."""
    found = []
    for number, stop in enumerate((None, 2)):
        options = PpoConfig(critic={"epochs": 2, "lr": 1e-2})
        world = World(tmp_path / str(number), algorithm=options, checkpoint_every=1, lr=1e-2, warmup=0)

        def learner(world=world, options=options):
            model = build_tiny_llama(TINY, 20, 0, pad_token_id=0, eos_token_id=1)
            return world.learner(TorchBackend(model, world.config), build_algorithm(options))

        one = learner()
        await one.start()
        for step in range(4):
            if step == stop:
                await one.close()
                one = learner()
                await one.start(takeover=True)
            await world.play(2, version=one.version)
            await one.step()
        found.append(([receipt.advantages for receipt in world.receipts], one._backend.save()))
        await one.close()
    (whole, files), (resumed, again) = found
    assert whole == resumed
    assert len(set(whole)) > 2  # the critic says something by then
    assert {name: files[name] for name in ("model.safetensors", CRITIC_FILE)} == {
        name: again[name] for name in ("model.safetensors", CRITIC_FILE)
    }


async def test_versions_of_the_warm_up_are_published_with_equal_weights(tmp_path):
    """P5: a version a step, as always; the third is the first that differs."""
    options = PpoConfig(critic={"warmup": 2})
    world = World(tmp_path, algorithm=options, lr=1e-2, warmup=0)
    model = build_tiny_llama(TINY, 20, 0, pad_token_id=0, eos_token_id=1)
    learner = world.learner(TorchBackend(model, world.config), build_algorithm(options))
    await learner.start()
    for number in range(3):
        await world.play(2, version=number)
        assert (await learner.step()).version == number + 1
    hashes = [one.content_hash for one in await world.registry.manifests()]
    assert hashes[0] == hashes[1] == hashes[2] != hashes[3]


@pytest.mark.parametrize("kind", ["head", "model"])
@pytest.mark.parametrize(
    "learner", [{"dtype": "bfloat16"}, {"lora": {"rank": 2}}, {"gradient_checkpointing": True}], ids=str
)
def test_it_goes_with_every_way_to_train(learner, kind):
    """Two steps and a restore: with half precision, with adapters, and with layers that are computed twice."""
    one, again = backend(learner, kind=kind), backend(learner, kind=kind)
    for seed in range(2):
        one.step(batch(seed), algorithm(kind=kind))
    again.restore(one.save())
    for seed in (2, 3):
        assert one.step(batch(seed), algorithm(kind=kind)) == again.step(batch(seed), algorithm(kind=kind))
    assert [values.tolist() for values in one.values(batch(0))] == [
        values.tolist() for values in again.values(batch(0))
    ]
    assert np.abs(np.concatenate(one.values(batch(0)))).max() > 0
