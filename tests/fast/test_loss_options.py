"""Aggregation, divergence from a reference, entropy and sequence ratios: by hand, and exact over microbatches."""

import math

import numpy as np
import pytest
import torch
from loss_kit import columns

from headrace.platform.config import GigpoConfig, GrpoConfig, ReinforceConfig, RlooConfig
from headrace.platform.contracts import AlgorithmNeeds
from headrace.platform.records import f32, i32
from headrace.trainer.aggregation import from_here_on, step_sequences, with_columns
from headrace.trainer.algorithms import Grpo, build_algorithm
from headrace.trainer.algorithms.divergence import estimate
from headrace.trainer.batch import LossTokens, pack
from headrace.trainer.samples import Sample

OPTIONS = {
    "token": {},
    "sequence": {"aggregation": "sequence"},
    "fixed": {"aggregation": "fixed", "fixed_length": 7},
    "gspo": {"aggregation": "sequence", "ratio": "sequence"},
    "kl_loss": {"kl": {"coefficient": 0.1, "kind": "k3"}, "aggregation": "sequence"},
    "kl_reward": {"kl": {"coefficient": 0.1, "kind": "k1", "where": "reward"}},
    "entropy": {"entropy": 0.3, "aggregation": "fixed", "fixed_length": 4},
    "decoupled": {"correction": {"kind": "decoupled", "weights": "sequence", "keep": [0.1, 3.0]}},
}


def loss(learner, batch, **options) -> float:
    return float(Grpo(GrpoConfig(**options)).loss(learner, batch).loss)


def random_step(lengths, seed=0):
    """Learner logprobs by sequence, and a maker of columns for some of the sequences with the totals of all."""
    generator = torch.Generator().manual_seed(seed)
    draw = [[(torch.rand(n, generator=generator) * -2).tolist() for n in lengths] for _ in range(4)]
    signs = [[(-1.0) ** s] * n for s, n in enumerate(lengths)]
    learner, behaviour, reference, proximal = draw

    def part(which, logprobs):
        chosen = {"reference": reference, "proximal": proximal}
        return columns(
            [behaviour[s] for s in which],
            [signs[s] for s in which],
            **{name: [rows[s] for s in which] for name, rows in chosen.items()},
            entropy=logprobs.square(),
            step_tokens=sum(lengths),
            step_sequences=len(lengths),
        )

    return learner, part


def accumulated(parts, lengths, options):
    """Loss and the gradient of every learner logprob, by sequence, when microbatches hold `parts`."""
    learner, part = random_step(lengths)
    algorithm, total, gradient = Grpo(GrpoConfig(**options)), 0.0, {}
    for which in parts:
        logprobs = torch.tensor([x for s in which for x in learner[s]], requires_grad=True)
        output = algorithm.loss(logprobs, part(which, logprobs))
        output.loss.backward()
        total += float(output.loss.detach())
        gradient.update(zip(which, logprobs.grad.split([lengths[s] for s in which]), strict=True))
    return total, torch.cat([gradient[s] for s in sorted(gradient)])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_microbatches_add_up_to_the_step(options):
    """case V6: whatever the aggregation, the denominators are the step's."""
    lengths = [3, 1, 5, 2]
    whole_loss, whole = accumulated([[0, 1, 2, 3]], lengths, options)
    split_loss, split = accumulated([[2], [3, 0], [1]], lengths, options)
    assert split_loss == pytest.approx(whole_loss, abs=1e-6)
    torch.testing.assert_close(split, whole, atol=1e-6, rtol=1e-5)
    assert float(whole.abs().sum()) > 0.1


def sequences() -> list[Sample]:
    """Three samples with 2, 4 and no loss tokens."""
    samples = []
    for number, loss_tokens in enumerate((2, 4, 0)):
        mask = np.array([0] * 2 + [1] * loss_tokens, np.uint8)
        samples.append(
            Sample(
                episode_id=f"e{number}",
                agent_id="",
                segment=0,
                lag=0,
                token_ids=i32(range(len(mask))),
                action_mask=mask,
                loss_mask=mask,
                behaviour_logprobs=f32(-mask),
                advantages=f32(mask * (number + 1.0)),
                temperatures=f32([1.0] * len(mask)),
            )
        )
    return samples


def test_a_samples_tokens_become_columns():
    """What a backend does: ratios 1, advantages 1 1 | 2 2 2 2, the mean of the sequences' means is 1.5.

    A sample without a loss token is no sequence.
    """
    step = sequences()
    assert step_sequences(step) == 2
    for size in (1000, 4):
        total = 0.0
        for micro in pack(step, size):
            tokens = with_columns(micro.loss_tokens(6), step_sequences=step_sequences(step))
            total += loss(tokens.behaviour_logprobs, tokens, aggregation="sequence")
        assert total == pytest.approx(-1.5)


def test_aggregation_by_hand():
    """Ratios 1 throughout, advantages 1 1 1 | -2. Token: 1/4. Sequence: (1 - 2) / 2. Fixed 8: 1 / 16."""
    batch = columns([[0.0] * 3, [0.0]], [[1.0] * 3, [-2.0]])
    learner = torch.zeros(4)
    assert loss(learner, batch) == pytest.approx(-1 / 4)
    assert loss(learner, batch, aggregation="sequence") == pytest.approx(1 / 2)
    assert loss(learner, batch, aggregation="fixed", fixed_length=8) == pytest.approx(-1 / 16)


def test_the_estimators_by_hand():
    """Policy 1/2, reference 1/4: d = log 2."""
    policy, reference = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    found = [float(estimate(kind, policy, reference)) for kind in ("k1", "k2", "k3")]
    assert found == pytest.approx([math.log(2), math.log(2) ** 2 / 2, 0.5 - 1 + math.log(2)])


def test_the_estimators_means_are_the_divergence():
    """k1 and k3 exactly, over a whole distribution; k2 nearly, for near distributions."""
    policy, reference = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.45, 0.33, 0.22])
    true = float((policy * (policy / reference).log()).sum())
    means = {k: float((policy * estimate(k, policy.log(), reference.log())).sum()) for k in ("k1", "k2", "k3")}
    assert means["k1"] == pytest.approx(true, abs=1e-6)
    assert means["k3"] == pytest.approx(true, abs=1e-6)
    assert means["k2"] == pytest.approx(true, rel=0.05)


def test_divergence_in_the_loss_by_hand():
    """Advantage 0, so the loss is 0.5 * k2 = 0.5 * log(2)^2 / 2, with gradient 0.5 * log 2."""
    learner = torch.tensor([math.log(0.5)], requires_grad=True)
    batch = columns([[math.log(0.5)]], [[0.0]], reference=[[math.log(0.25)]])
    output = Grpo(GrpoConfig(kl={"coefficient": 0.5, "kind": "k2"})).loss(learner, batch)
    assert float(output.loss.detach()) == pytest.approx(math.log(2) ** 2 / 4)
    output.loss.backward()
    assert learner.grad.tolist() == pytest.approx([math.log(2) / 2])


def test_divergence_in_the_reward_by_hand():
    """Charges k1 0.5 and 1.0 in one sequence, 2.0 in another: to go 1.5, 1.0 | 2.0, half of it off the advantages 1.

    On policy the loss is minus the mean of 0.25, 0.5, 0, and its gradient only that of the ratios.
    """
    learner = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    batch = columns([[-1.0, -1.0], [-1.0]], [[1.0, 1.0], [1.0]], reference=[[-1.5, -2.0], [-3.0]])
    kl = {"coefficient": 0.5, "kind": "k1", "where": "reward"}
    output = Grpo(GrpoConfig(kl=kl)).loss(learner, batch)
    assert float(output.loss.detach()) == pytest.approx(-0.25)
    output.loss.backward()
    assert learner.grad.tolist() == pytest.approx([-0.25 / 3, -0.5 / 3, 0.0])


def test_what_is_to_come_stays_within_the_row():
    found = from_here_on(torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([0, 0, 2, 2]))
    assert found.tolist() == [3.0, 2.0, 12.0, 8.0]


def test_entropy_is_a_bonus():
    """Ratios 1, advantages 0: the loss is minus 0.1 times the mean entropy 2, and the gradient reaches it."""
    entropy = torch.tensor([1.0, 3.0], requires_grad=True)
    batch = columns([[0.0, 0.0]], [[0.0, 0.0]], entropy=entropy)
    output = Grpo(GrpoConfig(entropy=0.1)).loss(torch.zeros(2), batch)
    assert float(output.loss.detach()) == pytest.approx(-0.2)
    output.loss.backward()
    assert entropy.grad.tolist() == pytest.approx([-0.05, -0.05])


def test_gspo_by_hand():
    """Ratios 4 and 1 in one sequence: geometric mean 2, clipped to 1.28 for advantage 1; the other is 1. Mean of both.

    Unclipped (advantage -1) each token's gradient is that of the mean: 2 * (1/2) / 2 sequences.
    """
    batch = columns([[0.0, 0.0], [0.0]], [[1.0, 1.0], [1.0]])
    learner = torch.log(torch.tensor([4.0, 1.0, 1.0]))
    options = OPTIONS["gspo"]
    assert loss(learner, batch, **options) == pytest.approx(-(1.28 + 1.0) / 2)
    output = Grpo(GrpoConfig(**options)).loss(learner, batch)
    assert output.clipped.tolist() == [True, True, False]
    worse = learner.clone().requires_grad_()
    Grpo(GrpoConfig(**options)).loss(worse, columns([[0.0, 0.0], [0.0]], [[-1.0, -1.0], [-1.0]])).loss.backward()
    assert worse.grad.tolist() == pytest.approx([0.5, 0.5, 0.5])


def test_a_loss_says_what_it_needs():
    assert Grpo(GrpoConfig()).needs == AlgorithmNeeds()
    kl = {"coefficient": 0.1}
    needs = Grpo(GrpoConfig(aggregation="fixed", kl=kl, entropy=0.1, returns={"cost": 0.5})).needs
    assert needs == AlgorithmNeeds(rewards=True, reference=True, entropy=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"aggregation": "sequence"}, "LossColumns"),
        ({"kl": {"coefficient": 0.1}}, "LossColumns"),
        ({"kl": {"coefficient": 0.1, "where": "reward"}}, "LossColumns"),
        ({"entropy": 0.1}, "LossColumns"),
    ],
)
def test_plain_loss_tokens_are_refused_by_options_that_need_more(options, words):
    plain = LossTokens(
        rows=(),
        row=torch.zeros(1, dtype=torch.long),
        column=torch.ones(1, dtype=torch.long),
        behaviour_logprobs=torch.zeros(1),
        advantages=torch.zeros(1),
        step_tokens=1,
    )
    with pytest.raises(ValueError, match=words):
        loss(torch.zeros(1), plain, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"aggregation": "fixed"}, "number of sequences"),
        ({"kl": {"coefficient": 0.1}}, "logprobs of the reference"),
        ({"entropy": 0.1}, "entropy"),
    ],
)
def test_a_missing_column_is_named(options, words):
    with pytest.raises(ValueError, match=words):
        loss(torch.zeros(1), columns([[0.0]], [[0.0]], step_sequences=0), **options)


@pytest.mark.parametrize("config", [RlooConfig, ReinforceConfig, GigpoConfig])
def test_all_algorithms_have_the_same_loss(config):
    """With the same options on the same tokens, to the last digit."""
    learner, part = random_step([3, 2])
    logprobs = torch.tensor([x for row in learner for x in row])
    batch = part([0, 1], logprobs)
    for options in OPTIONS.values():
        found = build_algorithm(config(**options)).loss(logprobs, batch)
        expected = Grpo(GrpoConfig(**options)).loss(logprobs, batch)
        assert float(found.loss) == float(expected.loss)
        assert torch.equal(found.ratio, expected.ratio)
