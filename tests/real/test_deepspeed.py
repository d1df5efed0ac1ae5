"""Two real ranks of DeepSpeed over gloo against the torch backend. The ranks stay up across the ZeRO stages."""

import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_kit import ProcessRanks
from safetensors.torch import load

from headrace.platform.config import GrpoConfig, LearnerConfig, TinyLlamaConfig
from headrace.platform.config.algorithm import KlConfig
from headrace.platform.config.deepspeed import DeepspeedConfig
from headrace.platform.errors import PartDied
from headrace.platform.records import f32, i32
from headrace.trainer.algorithms import build_algorithm
from headrace.trainer.backends import deepspeed as rank_module
from headrace.trainer.backends.deepspeed_engine import whole_bytes
from headrace.trainer.backends.ranked import RankedBackend
from headrace.trainer.backends.torch import TorchBackend
from headrace.trainer.model import build_tiny_llama, save_folder
from headrace.trainer.samples import Sample

pytestmark = pytest.mark.timeout(300)
VOCAB = 24
CONFIG = LearnerConfig(
    backend="deepspeed", ranks=2, microbatch_tokens=40, deepspeed=DeepspeedConfig(persist_below=0)
)  # nothing is so small here that ZeRO-3 would leave it whole
TOLERANCE = 1e-4
STEPS = 5
BAD = "run.t9.9.9"


def sample(name: str, prompt: list[int], length: int, rng: np.random.Generator) -> Sample:
    mask = np.zeros(length, np.uint8)
    mask[len(prompt) :] = rng.integers(0, 2, length - len(prompt))
    mask[-1] = 1
    return Sample(
        episode_id=name,
        agent_id="",
        segment=0,
        lag=0,
        token_ids=i32([*prompt, *rng.integers(0, VOCAB, length - len(prompt))]),
        action_mask=mask,
        loss_mask=mask,
        behaviour_logprobs=f32(mask * -rng.uniform(2.5, 3.5, length)),
        advantages=f32(mask * rng.choice([-1.0, 1.0])),
        temperatures=f32([1.0] * length),
    )


def batch(seed: int) -> list[Sample]:
    """Three groups of three, each with a prompt of its own; seven microbatches, which two ranks cannot share evenly."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, VOCAB, 3 + group).tolist() for group in range(3)]
    return [sample(f"run.t{seed}.{g}.{n}", prompts[g], 8 + 7 * n + g, rng) for g in range(3) for n in range(3)]


def poisoned(seed: int, which: int) -> list[Sample]:
    samples = batch(seed)
    bad = f32(np.where(samples[which].loss_mask == 1, np.nan, 0))
    samples[which] = dataclasses.replace(samples[which], episode_id=BAD, advantages=bad)
    return samples


class Steep:
    """GRPO with a term that is 0 and whose gradient is not finite."""

    def __init__(self) -> None:
        self._inner = build_algorithm(GrpoConfig())
        self.name, self.needs_variance, self.needs = "steep", True, self._inner.needs

    def loss(self, logprobs: torch.Tensor, tokens: Any) -> Any:
        output = self._inner.loss(logprobs, tokens)
        nothing = torch.sqrt((logprobs - logprobs.detach()).sum())
        return dataclasses.replace(output, loss=output.loss + nothing)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    config = TinyLlamaConfig(hidden=32, layers=2, heads=2, intermediate=32, max_positions=64)
    where = tmp_path_factory.mktemp("model")
    save_folder(build_tiny_llama(config, VOCAB, 0, pad_token_id=0, eos_token_id=1), where, {"tokenizer.json": b"{}"})
    return where


@pytest.fixture(scope="module")
def ranks():
    up = ProcessRanks(CONFIG)
    yield up
    up.end()


def staged(stage: int) -> LearnerConfig:
    return CONFIG.model_copy(update={"deepspeed": CONFIG.deepspeed.model_copy(update={"stage": stage})})


@pytest.fixture(scope="module", params=[0, 1, 2, 3])
def backend(request, ranks, folder) -> RankedBackend:
    """A fresh one for each stage; tests of a stage follow one another on it."""
    for built in ranks.ask("build", folder, staged(request.param)):
        built.result()
    return RankedBackend(ranks, 100.0)


@pytest.fixture(scope="module")
def alike(backend, folder) -> TorchBackend:
    """The torch backend that has made the same steps as `backend`."""
    return TorchBackend(folder, LearnerConfig(microbatch_tokens=40))


def weights_of(backend: Any) -> dict[str, torch.Tensor]:
    return load(backend.weights()["model.safetensors"])


def gap(one: Any, other: Any) -> float:
    mine, theirs = weights_of(one), weights_of(other)
    assert mine.keys() == theirs.keys() and {t.dtype for t in mine.values()} == {torch.float32}
    return max(float((mine[name] - theirs[name]).abs().max()) for name in mine)


def test_losses_and_weights_are_those_of_the_torch_backend(backend, alike):
    algorithm = build_algorithm(GrpoConfig())
    for seed in range(STEPS):
        found, expected = backend.step(batch(seed), algorithm), alike.step(batch(seed), algorithm)
        assert found.keys() == expected.keys()
        assert all(found[name] == pytest.approx(expected[name], abs=TOLERANCE) for name in expected)
        assert found.episodes.keys() == expected.episodes.keys()
        assert found["loss_tokens"] == sum(one.loss_tokens for one in batch(seed)), "what a rank repeats counts once"
    assert gap(backend, alike) < TOLERANCE
    assert backend.weights().keys() == alike.weights().keys()
    for mine, theirs in zip(backend.logprobs(batch(9)), alike.logprobs(batch(9)), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=TOLERANCE)


@pytest.mark.parametrize("which", [0, 8])
def test_a_loss_that_is_not_finite_on_one_rank_changes_nothing_on_any(backend, alike, which):
    """In the first pass, and in the last, when gradients have been added up."""
    before = backend.weights()
    with pytest.raises(ArithmeticError, match=f"the loss is not finite; episodes {BAD}$"):
        backend.step(poisoned(5, which), build_algorithm(GrpoConfig()))
    assert backend.weights() == before
    algorithm = build_algorithm(GrpoConfig())
    found, expected = backend.step(batch(6), algorithm), alike.step(batch(6), algorithm)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], abs=TOLERANCE), "nothing was left of it"
    assert gap(backend, alike) < TOLERANCE


def test_a_gradient_that_is_not_finite_changes_nothing(backend, alike):
    before = backend.weights()
    with pytest.raises(ArithmeticError, match=r"the gradient is not finite; episodes run\.t7\.0\.0, run\.t7"):
        backend.step(batch(7), Steep())
    assert backend.weights() == before
    algorithm = build_algorithm(GrpoConfig())
    backend.step(batch(7), algorithm), alike.step(batch(7), algorithm)
    assert gap(backend, alike) < TOLERANCE


def test_a_saved_state_goes_on_exactly(backend):
    algorithm = build_algorithm(GrpoConfig())
    saved = backend.save()
    expected, weights = dict(backend.step(batch(10), algorithm)), backend.weights()
    backend.step(batch(11), algorithm)
    backend.restore(saved)
    assert dict(backend.step(batch(10), algorithm)) == expected
    assert backend.weights() == weights
    torn = {**saved, "ranks.json": saved["ranks.json"].replace(b'"world_size":2', b'"world_size":4')}
    with pytest.raises(ValueError, match=r"the checkpoint is of learner\.ranks=4, learner\.deepspeed\.stage=."):
        backend.restore(torn)
    with pytest.raises(ValueError, match=r"the checkpoint is not of learner\.backend=deepspeed"):
        backend.restore({"optimizer.pt": b""})


def test_a_batch_without_loss_tokens_is_refused_by_all(backend):
    empty = [dataclasses.replace(one, loss_mask=np.zeros(one.length, np.uint8)) for one in batch(0)]
    with pytest.raises(ValueError, match="no token"):
        backend.step(empty, build_algorithm(GrpoConfig()))


def gathered_at_once(rank: Any, piece_bytes: int) -> tuple[list[int], dict[str, bytes]]:
    """On a rank: how many bytes were whole at a time while it wrote its weights, and what it wrote."""
    held, gathered = [], rank_module.gathered

    def noted(parameters: Any) -> Any:
        held.append(sum(map(whole_bytes, parameters)))
        return gathered(parameters)

    rank_module.gathered = noted
    try:
        return held, rank.weights(piece_bytes)
    finally:
        rank_module.gathered = gathered


def test_a_reference_entropy_and_layers_computed_twice(ranks, folder):
    """What asks more of the forward pass than a plain loss, where weights are parted."""
    given = GrpoConfig(kl=KlConfig(coefficient=0.1), entropy=0.01)
    config = staged(3).model_copy(update={"algorithm": given, "gradient_checkpointing": True})
    for built in ranks.ask("build", folder, config):
        built.result()
    backend, alike = RankedBackend(ranks, 100.0), TorchBackend(folder, config)
    for seed in range(2):
        found = backend.step(batch(seed), build_algorithm(given))
        expected = alike.step(batch(seed), build_algorithm(given))
        assert {"entropy", "reference_kl"} <= found.keys() == expected.keys()
        assert all(found[name] == pytest.approx(expected[name], abs=TOLERANCE) for name in expected)
    assert gap(backend, alike) < TOLERANCE


@pytest.fixture(scope="module")
def sharded(ranks, folder) -> RankedBackend:
    """At stage 3, for what follows on the stages."""
    for built in ranks.ask("build", folder, staged(3)):
        built.result()
    return RankedBackend(ranks, 100.0)


class TestStage3:
    """In this order: the last one ends the ranks."""

    def test_weights_are_gathered_in_bounded_pieces(self, sharded, ranks):
        limit = 8192
        (held, files), (_, nothing) = (each.result() for each in ranks.ask("call", gathered_at_once, limit))
        assert files == sharded.weights() and nothing == {}
        assert len(held) > 4 and max(held) <= limit
        assert sum(held) == sum(t.nbytes for t in load(files["model.safetensors"]).values())

    def test_ranks_that_were_given_other_batches_do_not_step(self, sharded, ranks):
        """P13"""
        before = sharded.weights()
        asked = ranks.ask("call", step_of_another_order, batch(0))
        errors = [str(each.exception()) for each in asked]
        assert "learner ranks [1] are about to take another step" in errors[0]
        assert "learner ranks [0] are about to take another step" in errors[1]
        assert sharded.weights() == before

    def test_a_rank_that_hangs_ends_all(self, ranks):
        """P13: the other one waits for it in the middle of a step, and does not go on alone."""
        os.kill(ranks.processes[1].pid, signal.SIGSTOP)
        impatient = RankedBackend(ranks, 2.0)
        with pytest.raises(PartDied, match=r"learner ranks \[0, 1\] gave no answer to 'step' within 2 s"):
            impatient.step(batch(1), build_algorithm(GrpoConfig()))
        assert not any(process.is_alive() for process in ranks.processes)
        with pytest.raises(PartDied, match="gave no answer"):
            impatient.weights()


def step_of_another_order(rank: Any, samples: list[Sample]) -> Any:
    """On rank 1 the batch comes in another order."""
    return rank.step(samples[::-1] if rank._rank else samples, build_algorithm(GrpoConfig()))
