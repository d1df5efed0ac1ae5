"""The policy loss against an independent NumPy version: token by token in float64, with its gradient written out.

What PPO, GRPO and RLOO do with an advantage is the same clipped surrogate, so this is its parity for all of them, under
every option of the loss and with them combined. Advantages of groups have a version here too.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from loss_kit import columns

from headrace.platform.config import GrpoConfig, RlooConfig
from headrace.platform.config.algorithm import AlgorithmOptions
from headrace.platform.testing.conformance.algorithm import scored
from headrace.trainer.algorithms import Grpo, Rloo

LENGTHS = (7, 1, 12, 4)
TOLERANCE = 1e-5
Rows = list[np.ndarray]


def rows(rng: np.random.Generator, mean: float, spread: float) -> Rows:
    return [rng.normal(mean, spread, length) for length in LENGTHS]


def divergence(kind: str, d: float) -> tuple[float, float]:
    """An estimate and its derivative by the policy's logprob; d is that less the reference's."""
    return {
        "k1": (d, 1.0),
        "k2": (d * d / 2, d),
        "k3": (math.exp(-d) - 1 + d, 1 - math.exp(-d)),
    }[kind]


def by_hand(config: AlgorithmOptions, pi: Rows, mu: Rows, proximal: Rows, reference: Rows, credit: Rows):
    """The loss, and its derivative by each logprob of `pi`."""
    loss, gradient = 0.0, [np.zeros(length) for length in LENGTHS]
    for s, length in enumerate(LENGTHS):
        share = {
            "token": 1 / sum(LENGTHS),
            "sequence": 1 / (len(LENGTHS) * length),
            "fixed": 1 / (len(LENGTHS) * config.fixed_length),
        }[config.aggregation]
        decoupled = config.correction.kind == "decoupled"
        away = pi[s] - (proximal[s] if decoupled else mu[s])
        stale = proximal[s] - mu[s]
        kept = True
        if config.correction.keep is not None:
            low, high = config.correction.keep
            kept = low <= math.exp((pi[s] - mu[s]).mean()) <= high
        for t in range(length):
            ratio = math.exp(away.mean() if config.ratio == "sequence" else away[t])
            weight = float(kept)
            if decoupled:
                whole = stale.sum() if config.correction.weights == "sequence" else stale[t]
                weight *= min(math.exp(whole), config.correction.cap)
            advantage = credit[s][t]
            if config.kl.where == "reward":
                ahead = range(t, length)
                charged = sum(divergence(config.kl.kind, mu[s][u] - reference[s][u])[0] for u in ahead)
                advantage -= config.kl.coefficient * charged
            bounded = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
            if ratio * advantage <= bounded * advantage:
                loss -= share * weight * ratio * advantage
                gradient[s][t] -= share * weight * ratio * advantage
            else:
                loss -= share * weight * bounded * advantage
            if config.kl.where == "loss":
                value, slope = divergence(config.kl.kind, pi[s][t] - reference[s][t])
                loss += share * config.kl.coefficient * value
                gradient[s][t] += share * config.kl.coefficient * slope
    return loss, np.concatenate(gradient)


CORRECTIONS = (
    {"kind": "clip"},
    {"kind": "clip", "keep": (0.9, 1.1)},
    {"kind": "decoupled", "weights": "token", "cap": 1.1},
    {"kind": "decoupled", "weights": "sequence", "cap": 1.3, "keep": (0.9, 1.15)},
)
DIVERGENCES = (
    {"coefficient": 0.0},
    {"coefficient": 0.2, "kind": "k1", "where": "reward"},
    {"coefficient": 0.2, "kind": "k2"},
    {"coefficient": 0.2, "kind": "k3"},
)
OPTIONS = list(itertools.product(("token", "sequence", "fixed"), ("token", "sequence"), CORRECTIONS, DIVERGENCES))


@pytest.mark.parametrize("seed", range(3))
def test_the_policy_loss_and_its_gradient(seed):
    """All 96 ways to combine options; tokens are clipped on both sides, sequences dropped, weights cut."""
    rng = np.random.default_rng(seed)
    pi = rows(rng, -1.5, 0.5)
    mu, proximal, reference = ([row + rng.normal(0, spread, len(row)) for row in pi] for spread in (0.3, 0.1, 0.4))
    credit = rows(rng, 0.0, 1.0)
    for aggregation, ratio, correction, kl in OPTIONS:
        config = GrpoConfig(aggregation=aggregation, ratio=ratio, correction=correction, kl=kl, fixed_length=16)
        loss, gradient = by_hand(config, pi, mu, proximal, reference, credit)
        batch = columns(mu, credit, proximal=proximal, reference=reference)
        logprobs = torch.tensor(np.concatenate(pi), dtype=torch.float32, requires_grad=True)
        output = Grpo(config).loss(logprobs, batch)
        output.loss.backward()
        where = f"{aggregation} {ratio} {correction} {kl}"
        assert float(output.loss.detach()) == pytest.approx(loss, abs=TOLERANCE), where
        assert logprobs.grad.numpy() == pytest.approx(gradient, abs=TOLERANCE), where


@pytest.mark.parametrize("size", [2, 5, 16])
def test_advantages_of_a_group(size):
    scores = np.random.default_rng(size).random(size).round(3)
    group = [scored(number, float(score)) for number, score in enumerate(scores)]
    deviation = math.sqrt(sum((one - scores.mean()) ** 2 for one in scores) / (size - 1))
    expected = [(one - scores.mean()) / (deviation + 1e-4) for one in scores]
    assert [one[0] for one in Grpo(GrpoConfig()).advantages(group)] == pytest.approx(expected, abs=TOLERANCE)
    others = [one - np.delete(scores, number).mean() for number, one in enumerate(scores)]
    assert [one[0] for one in Rloo(RlooConfig()).advantages(group)] == pytest.approx(others, abs=TOLERANCE)
