"""GRPO's loss on numbers worked by hand, and what masks, padding and microbatches may not change."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from headrace.platform.config import GrpoConfig, LearnerConfig, TinyLlamaConfig
from headrace.platform.records import f32, i32
from headrace.trainer.algorithms import Grpo
from headrace.trainer.backends.torch import TorchBackend
from headrace.trainer.batch import LossTokens, pack, step_tokens
from headrace.trainer.forward import TokenLogprobs
from headrace.trainer.model import build_tiny_llama
from headrace.trainer.samples import Sample

TINY = TinyLlamaConfig(hidden=16, layers=1, heads=2, intermediate=16, max_positions=64)


def tokens(behaviour, advantages, step_total) -> LossTokens:
    return LossTokens(
        rows=(),
        row=torch.zeros(len(behaviour), dtype=torch.long),
        column=torch.arange(len(behaviour)),
        behaviour_logprobs=torch.tensor(behaviour),
        advantages=torch.tensor(advantages),
        step_tokens=step_total,
    )


def sample(name: str, length: int, seed: int, advantage: float = 1.0) -> Sample:
    rng = np.random.default_rng(seed)
    mask = np.zeros(length, np.uint8)
    mask[2::2] = 1
    return Sample(
        episode_id=name,
        agent_id="",
        segment=0,
        lag=0,
        token_ids=i32(rng.integers(0, 20, length)),
        action_mask=mask,
        loss_mask=mask,
        behaviour_logprobs=f32(mask * -rng.uniform(1, 5, length)),
        advantages=f32(mask * advantage),
        temperatures=f32([1.0] * length),
    )


def samples() -> list[Sample]:
    return [sample(f"e{n}", 4 + 3 * n, n, advantage=(-1.0) ** n) for n in range(5)]


def gradients(batch, microbatch_tokens: int) -> tuple[float, list[torch.Tensor]]:
    """Loss and gradients of one step, accumulated over microbatches, without an optimizer."""
    model = build_tiny_llama(TINY, 20, 0, pad_token_id=0, eos_token_id=1)
    forward, algorithm, loss = TokenLogprobs(model), Grpo(GrpoConfig()), 0.0
    for micro in pack(batch, microbatch_tokens):
        chosen = micro.loss_tokens(step_tokens(batch))
        logprobs = forward(micro.token_ids, micro.is_token, micro.loss_mask, micro.temperatures)
        output = algorithm.loss(logprobs, chosen)
        output.loss.backward()
        loss += float(output.loss.detach())
    return loss, [parameter.grad.clone() for parameter in model.parameters()]


def test_clipped_surrogate_by_hand():
    """Ratios 1, 2, 0.5, 2 and advantages 1, 1, -1, -1 with clips 0.2 and 0.28 over a step of 8 tokens.

    Surrogates: 1; min(2, 1.28) = 1.28; min(-0.5, -0.8) = -0.8; min(-2, -1.28) = -2. Sum -0.52, loss 0.52 / 8.
    """
    learner = torch.log(torch.tensor([1.0, 2.0, 0.5, 2.0])) - 3.0
    output = Grpo(GrpoConfig()).loss(learner, tokens([-3.0] * 4, [1.0, 1.0, -1.0, -1.0], 8))
    assert float(output.loss) == pytest.approx(0.52 / 8)
    assert output.clipped.tolist() == [False, True, True, False]
    assert output.ratio.tolist() == pytest.approx([1.0, 2.0, 0.5, 2.0])
    expected_kl = [0.0, 1 - math.log(2), math.log(2) - 0.5, 1 - math.log(2)]
    assert output.kl.tolist() == pytest.approx(expected_kl, abs=1e-6)


def test_clipped_tokens_have_no_gradient():
    learner = (torch.log(torch.tensor([2.0, 1.0])) - 1.0).requires_grad_()
    Grpo(GrpoConfig()).loss(learner, tokens([-1.0, -1.0], [1.0, 1.0], 2)).loss.backward()
    assert learner.grad.tolist() == pytest.approx([0.0, -0.5])


def test_a_far_ratio_stays_finite():
    output = Grpo(GrpoConfig()).loss(torch.tensor([-1.0]), tokens([-200.0], [-1.0], 1))
    assert bool(torch.isfinite(output.loss))


def test_microbatches_add_up_to_one_batch():
    whole_loss, whole = gradients(samples(), 10_000)
    split_loss, split = gradients(samples(), 16)
    assert len(pack(samples(), 16)) == 4
    assert split_loss == pytest.approx(whole_loss, abs=1e-6)
    for one, other in zip(whole, split, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def test_the_order_of_arrival_does_not_change_the_gradient():
    """case V6: the same episodes, however they came, give the same gradient, to the last digit."""
    loss, one = gradients(samples(), 32)
    reversed_loss, other = gradients(samples()[::-1], 32)
    assert loss == reversed_loss
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("field", ["behaviour_logprobs", "advantages", "temperatures"])
def test_nan_at_a_masked_position_does_not_leak(field):
    """case T9"""
    clean = samples()
    spoiled = [
        dataclasses.replace(s, **{field: f32(np.where(s.loss_mask == 1, getattr(s, field), np.nan))}) for s in clean
    ]
    loss, one = gradients(clean, 64)
    spoiled_loss, other = gradients(spoiled, 64)
    assert spoiled_loss == loss
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_garbage_in_the_padding_changes_nothing():
    """case T10: ids outside the vocabulary, NaN, infinities."""
    model = build_tiny_llama(TINY, 20, 0, pad_token_id=0, eos_token_id=1)
    forward, algorithm = TokenLogprobs(model), Grpo(GrpoConfig())
    (micro,) = pack(samples(), 10_000)
    padding = ~micro.is_token
    assert int(padding.sum()) > 20
    results = []
    for ids, value in [(0, 0.0), (-7, float("nan")), (10**6, float("inf"))]:
        dirty = dataclasses.replace(
            micro,
            token_ids=torch.where(padding, ids, micro.token_ids),
            behaviour_logprobs=torch.where(padding, value, micro.behaviour_logprobs),
            advantages=torch.where(padding, value, micro.advantages),
            temperatures=torch.where(padding, value, micro.temperatures),
        )
        model.zero_grad()
        logprobs = forward(dirty.token_ids, dirty.is_token, dirty.loss_mask, dirty.temperatures)
        output = algorithm.loss(logprobs, dirty.loss_tokens(step_tokens(samples())))
        output.loss.backward()
        results.append((float(output.loss.detach()), float(output.kl.mean()), model.model.norm.weight.grad.tolist()))
    assert results[0] == results[1] == results[2]


def test_statistics_of_a_step():
    """On policy the ratio is 1, nothing is clipped, KL is 0, and the loss is minus the mean advantage."""
    backend = TorchBackend(build_tiny_llama(TINY, 20, 0, pad_token_id=0, eos_token_id=1), LearnerConfig())
    off = samples()
    on = [
        dataclasses.replace(s, behaviour_logprobs=f32(np.where(s.loss_mask == 1, row, 0)))
        for s, row in zip(off, backend.logprobs(off), strict=True)
    ]
    statistics = backend.step(on, Grpo(GrpoConfig()))
    total = sum(s.loss_tokens for s in on)
    assert statistics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert statistics["clip_share"] == 0.0
    assert statistics["kl"] == pytest.approx(0.0, abs=1e-5)
    assert statistics["loss"] == pytest.approx(-sum(float(s.advantages.sum()) for s in on) / total, abs=1e-5)
    assert statistics["loss_tokens"] == total
    assert {name: one.loss_tokens for name, one in statistics.episodes.items()} == {
        s.episode_id: s.loss_tokens for s in on
    }
